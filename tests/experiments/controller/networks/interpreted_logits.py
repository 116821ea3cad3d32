"""The device's logits against the host's in Triton's interpreter, printed as one line of JSON.

Run with TRITON_INTERPRET=1, which has to be set before Triton is imported.
"""

import json

import torch

from experiment_core_utils.models.common.cuda_graphs import Reruns
from tests.experiments.controller.networks.compared_logits import compared

if __name__ == "__main__":
    print(json.dumps(compared(torch.device("cpu"), torch.float32, Reruns())))
