"""Networks made by hand whose choices depend on their inputs, as those of trained ones do."""

import torch

from experiments.controller.networks.two_stage import TwoStageNetworks


def trained_looking(networks: TwoStageNetworks) -> TwoStageNetworks:
    """The same networks with logits far from equal and biases that are not zero."""
    generator = torch.Generator().manual_seed(1)
    for head in (networks.first_out, networks.second_out):
        head.weight.data.mul_(40)
        head.bias.data.add_(torch.randn(head.bias.shape, generator=generator))
    return networks
