"""A run's folder that fills every section of a report, with texts that would be markup if nobody escaped them."""

import copy
from pathlib import Path

from experiment_core_utils.records.caveats import caveat, caveat_fields
from tests.experiments.hand_made_sweep import FLOPS, PROVENANCE, result, setting, write
from tests.hand_made_records import VisionGeometry, measured_sample, staged_run

HOSTILE = '<img src="https://example.org/x.png" onerror="document.title=1"></script><script>document.title=2</script>'
LARGE = VisionGeometry(5, (1, 5), (336, 1232), 864)


def reported_folder(folder: Path, random_weights: bool = False, num_settings: int = 12) -> Path:
    """Two tiers, top-k 2 and 4, 2 to 4 blocks, 4 samples each.

    Vision takes 100 ms for the low tier, 1 s for the high one, prefill 40 ms and a decode step 10 ms a block, and
    each sample 1 % more than the one before. The low tier gets half of the points; top-k is of no consequence.
    """
    results = []
    knobs = [(tier, top_k, blocks) for tier in ("low", "high") for top_k in (2, 4) for blocks in (2, 3, 4)]
    for tier, top_k, blocks in knobs[:num_settings]:
        samples = []
        for number in range(4):
            slower = 1 + 0.01 * number
            vision_s, score = (0.1, "0.5") if tier == "low" else (1.0, "1.0")
            run = staged_run(vision_s, 0.04 * blocks * slower, (0.01 * blocks * slower,) * (2 + number % 2))
            samples.append(
                measured_sample(number, run, prediction=score, flops=FLOPS, image_id=f"{HOSTILE}{number}",
                                geometry=None if tier == "low" else LARGE)
            )  # fmt: skip
        stored = result(setting(tier, top_k, blocks), samples)
        provenance = copy.deepcopy(PROVENANCE)
        provenance["model"]["name"] = f"models/{HOSTILE}"
        provenance["command"] = f"python3 acc_lat_profiling.py {HOSTILE}"
        provenance["experimental_variables"]["random_weights"] = random_weights
        found = [caveat("few_samples", num_samples=4, least=500), caveat("throttled", reasons=[HOSTILE])]
        provenance.update(caveat_fields(found))
        results.append(stored | {"provenance": provenance})
    return write(folder, *results)
