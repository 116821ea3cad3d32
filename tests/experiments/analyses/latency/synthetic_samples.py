"""Samples whose times follow known laws, for tests of what is fitted to them."""

from functools import cache

import numpy as np

from experiments.analyses.latency.estimator import LatencyEstimator
from experiments.analyses.latency.features import RequestColumns, TimedSamples

# Tiles -> image features that enter the language model.
TIERS = {"low": ((1, 288), (3, 480)), "medium": ((4, 560), (8, 864)), "high": ((9, 928), (12, 1168), (15, 1376))}


def grid_requests(samples_each: int = 4, output_tokens: int = 9) -> tuple[RequestColumns, np.ndarray]:
    """The requests of a full grid of 3 tiers, top-k 4, 6, 8 and 12, 14, 16 blocks, and the setting of each."""
    rows, settings = [], []
    for tier, pictures in TIERS.items():
        for top_k in (4, 6, 8):
            for blocks in (12, 14, 16):
                for sample in range(samples_each):
                    crops, vision_tokens = pictures[sample % len(pictures)]
                    rows.append((vision_tokens, crops, 12 + sample, top_k, blocks, output_tokens + sample))
                    settings.append(f"signs {tier}_topk{top_k}_blocks{blocks}")
    return RequestColumns(*np.array(rows, dtype=np.float64).T), np.array(settings)


def samples_of(
    requests: RequestColumns, settings: np.ndarray, vision: np.ndarray, prefill: np.ndarray, per_token: np.ndarray
) -> TimedSamples:
    """The same with the stages' times [S]; the total is their sum."""
    total = vision + prefill + (requests.output_tokens - 1) * per_token
    times = {"T_vision_total": vision, "T_LLM_prefill": prefill, "T_decode_per_token": per_token, "T_total": total}
    return TimedSamples(requests, times, settings, np.full(len(requests), "signs"))


def working_samples(noise: float = 0.0, seed: int = 0, samples_each: int = 4) -> TimedSamples:
    """Of a device whose work decides: 2 ms and 1 ms a crop; 3 ms, 0.001 ms a block and token, 0.0005 ms a later expert
    and token; 0.2 ms and 0.5 ms a block for each token. Noise is lognormal, with this standard deviation."""
    requests, settings = grid_requests(samples_each)
    tokens = requests.vision_tokens + requests.text_tokens
    experts = (requests.num_active_blocks - 1) * requests.top_k
    vision = 2.0 + 1.0 * (requests.crops + 1)
    prefill = 3.0 + 0.001 * requests.num_active_blocks * tokens + 0.0005 * experts * tokens
    per_token = 0.2 + 0.5 * requests.num_active_blocks
    generator = np.random.default_rng(seed)
    noisy = [each * np.exp(noise * generator.normal(size=len(requests))) for each in (vision, prefill, per_token)]
    return samples_of(requests, settings, *noisy)


# What the slower device does to each stage: times this factor, plus this many milliseconds.
SLOWER = {"T_vision_total": (1.8, 0.0), "T_LLM_prefill": (1.4, 3.0), "T_decode_per_token": (1.2, 1.0)}


def slower_device(samples: TimedSamples) -> TimedSamples:
    """The same samples with times changed by SLOWER."""
    stages = (samples.times[name] * factor + added for name, (factor, added) in SLOWER.items())
    return samples_of(samples.requests, samples.settings, *stages)


@cache
def working_estimator(noise: float = 0.0) -> LatencyEstimator:
    """Fitted to `working_samples` when first needed: a fit takes most of a second."""
    return LatencyEstimator().fit(working_samples(noise))
