"""Every figure of a run that is printed, recomputed from its journals alone by a second, small implementation.

A model with random times answers in one to four tokens, with and without a picture; several questions share a picture,
and one has none that can be read.
"""

import csv
import html
import json
import math
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import knob_profiler as kp
from experiment_core_utils.b_model_loader import BACKENDS, register_backend
from experiment_core_utils.config.parts import ModelConfig
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.models.source import ModelSource, RequestedModel
from experiment_core_utils.primitives.device import Marks
from experiment_core_utils.records.ledger import PARTS_FOLDER
from experiment_core_utils.records.requests import PreparedRequest, StageFlops, TimedTokens
from experiment_core_utils.tasks.interface import Sample
from experiments.analyses.knobs.grid import grids_of
from experiments.analyses.knobs.objectives import LATENCY_MEAN, LATENCY_P95, Objectives, objectives
from experiments.analyses.knobs.records import _setting_entries
from experiments.analyses.stages.analysis import analyse_stages
from experiments.analyses.sweeps import load_sweep, runs_frame, samples_frame
from experiments.controller.lookup import build
from experiments.controller.measured_grid import load_grid
from knob_profiler.__main__ import main
from tests.scripted.opaque_model import EOS, OpaqueModel, OpaqueSource, opaque_source
from tests.tasks.datasets.layouts import BLUE, RED, plain, write_picture

# Names of the model's times in a journal, in seconds, and published, in milliseconds.
STAGES = {"vision_s": "T_vision_total", "prefill_s": "T_LLM_prefill", "decode_s": "T_LLM_decode"}
FLOPS = StageFlops(vision_flops=7 * 10**9, prefill_flops=3 * 10**9, decode_flops_per_token=2e9)


@dataclass
class Unsteady(OpaqueModel):
    """Its stages take up to 2 ms by chance, and the answer has as many tokens as the prompt says.

    While it runs it links the journals of the results' folder, so that they are there after the run has removed them.
    """

    folder: Path = Path()
    chance: random.Random = field(default_factory=lambda: random.Random(5))

    def prepare(self, sample: Sample, prompt: str, crops: CropRange | None) -> PreparedRequest:
        found = super().prepare(sample, prompt, crops)
        length = int(re.findall(r"[0-9]+", sample.question)[0])
        return PreparedRequest({**found.inputs, "length": length, "picture": sample.image is not None}, found.shape)

    def generate_timed(self, inputs: Mapping[str, Any], max_new_tokens: int, marks: Marks) -> TimedTokens:
        for path in (self.folder / PARTS_FOLDER).glob("*.jsonl"):
            link = self.folder.parent / path.name
            if not link.exists():
                link.hardlink_to(path)
        tokens = (*range(1, inputs["length"]), EOS)
        spans = [*(["vision"] if inputs["picture"] else []), "prefill", *("decode" for _ in tokens[1:])]
        marks.mark()
        for _ in spans:
            time.sleep(0.002 * self.chance.random())
            marks.mark()
        return TimedTokens(tokens, tuple(spans))  # type: ignore[arg-type]

    def count_flops(self, setting: Setting, shape: Any, output_tokens: int) -> StageFlops:
        steps = None if output_tokens < 2 else FLOPS.decode_flops_per_token
        return replace(FLOPS, decode_flops_per_token=steps)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for results of `--model_path unsteady`, which is like the opaque model; journals stay beside it."""
    folder = tmp_path / "results"

    class UnsteadySource(OpaqueSource):
        def load(self, config: ModelConfig, device: torch.device, *, is_profiled: bool = False) -> OpaqueModel:
            return Unsteady(device=device, folder=folder)

    def backend(requested: RequestedModel) -> ModelSource | None:
        source = opaque_source(replace(requested, path="opaque"))
        if requested.path != "unsteady" or source is None:
            return None
        return UnsteadySource("unsteady", source.limits, revision=None)

    register_backend(backend)
    yield folder
    BACKENDS.remove(backend)


def data_file(folder: Path) -> Path:
    """Eight questions: three of one picture, two of another, two without, and one whose picture is not there."""
    for name, colour in {"red": RED, "blue": BLUE}.items():
        write_picture(folder / f"{name}.png", plain(colour))
    of = [("red", 3), ("blue", 1), (None, 2), ("red", 4), ("green", 2), (None, 1), ("red", 1), ("blue", 3)]
    rows = [
        {"question": f"Give {length} tokens", "answer": "1 2" if length == 3 else "no"}
        | ({} if name is None else {"image": f"{name}.png"})
        for name, length in of
    ]
    path = folder / "mine.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


Run = Mapping[str, Any]


@dataclass
class Recomputed:
    """A setting's samples by their ids, from its journal."""

    samples: dict[int, Mapping[str, Any]]
    failed: int

    @classmethod
    def of(cls, path: Path) -> "Recomputed":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        samples = [line["sample"] for line in lines if "sample" in line]
        measured = {each["measured"]["sample_id"]: each["measured"] for each in samples if each["measured"]}
        return cls(dict(sorted(measured.items())), len(samples) - len(measured))

    def of_runs(self, quantity: str) -> list[list[float]]:
        """Milliseconds of every run of each sample; of a quantity per token, of runs with one alone."""
        found = []
        for sample in self.samples.values():
            own = [_ms(run, quantity) for run in sample["runs"]]
            found.append([each for each in own if each is not None])
        return found

    def sample_means(self, quantity: str) -> list[float | None]:
        return [sum(own) / len(own) if own else None for own in self.of_runs(quantity)]

    def mean(self, quantity: str) -> float:
        known = [each for each in self.sample_means(quantity) if each is not None]
        return sum(known) / len(known)

    def typical(self, quantity: str) -> list[float]:
        """The mean of the one run, or the two, in the middle by total time."""
        found = []
        for own, totals in zip(self.of_runs(quantity), self.of_runs("T_total"), strict=True):
            order = sorted(range(len(totals)), key=totals.__getitem__)
            middle = {order[(len(order) - 1) // 2], order[len(order) // 2]}
            found.append(sum(own[at] for at in middle) / len(middle))
        return found

    def percentile(self, quantity: str, percent: float, typical: bool = False) -> float:
        """By numpy: each run as often as the sample has parts of the smallest common number."""
        lists = [[each] for each in self.typical(quantity)] if typical else self.of_runs(quantity)
        return float(np.percentile([each for own in lists for each in own], percent))

    def interval(self, quantity: str) -> tuple[float, float]:
        """Student's t of the logarithm of the mean, over pictures."""
        mean, totals = self.mean(quantity), dict[str, list[float]]()
        for sample, own in zip(self.samples.values(), self.sample_means(quantity), strict=True):
            if own is not None:
                totals.setdefault(sample["image_id"], []).append(own)
        groups, number = len(totals), sum(map(len, totals.values()))
        squares = sum((sum(own) - mean * len(own)) ** 2 for own in totals.values())
        error = math.sqrt(groups / (groups - 1) * squares) / number
        times = math.exp(float(stats.t.ppf(0.975, groups - 1)) * error / mean)
        return mean / times, mean * times

    @property
    def tokens(self) -> list[int]:
        return [len(each["runs"][0]["token_ids"]) for each in self.samples.values()]

    @property
    def gflop(self) -> float:
        return 3.0 + sum(2.0 * (tokens - 1) for tokens in self.tokens) / len(self.tokens) + 7.0

    @property
    def accuracy(self) -> float:
        # The answer of three tokens is "1 2", which is right.
        return sum(tokens == 3 for tokens in self.tokens) / len(self.tokens)


def _ms(run: Run, quantity: str) -> float | None:
    """A stage that did not run took none of the time."""
    named = {published: name for name, published in STAGES.items()}
    if quantity in named:
        return 1000 * (run[named[quantity]] or 0.0)
    if quantity == "T_first_token":
        return 1000 * ((run["vision_s"] or 0.0) + run["prefill_s"])
    if quantity == "T_decode_per_token":
        steps = len(run["token_ids"]) - 1
        return 1000 * run["decode_s"] / steps if steps else None
    return 1000 * run["total_s"]


TIMES = (*STAGES.values(), "T_total", "T_first_token", "T_decode_per_token")


def recomputed(folder: Path) -> dict[str, Recomputed]:
    """By the key of the setting."""
    journals = [*folder.glob("*.rank0.jsonl")]
    named = {json.loads(path.read_text().splitlines()[0])["header"]["key"]: path for path in journals}
    return {key: Recomputed.of(path) for key, path in sorted(named.items())}


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-9)


def in_table(value: float) -> Any:
    """Six digits."""
    return pytest.approx(value, rel=5.1e-6)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def check_aggregates(result: Mapping[str, Any], own: Recomputed) -> None:
    found = result["aggregate_stats"]
    for name in TIMES:
        assert found[f"{name}_mean"] == near(own.mean(name)), name
        runs = [each for each in own.of_runs(name) if each]
        every = [each for own in runs for each in own]
        assert found[f"{name}_n"] == len(every)
        assert (found[f"{name}_min"], found[f"{name}_max"]) == (near(min(every)), near(max(every)))
        assert found[f"{name}_std"] == near(float(np.std(every, ddof=1)))
        for percent in (50, 95, 99):
            assert found[f"{name}_p{percent}"] == near(own.percentile(name, percent)), name
        assert (found[f"{name}_ci95_low"], found[f"{name}_ci95_high"]) == tuple(map(near, own.interval(name)))
        assert found[f"{name}_ci95_low"] > 0.0
    for name in (*STAGES.values(), "T_total", "T_first_token"):
        assert found[f"{name}_mean_typical"] == near(sum(own.typical(name)) / len(own.samples))
        assert found[f"{name}_p95_typical"] == near(own.percentile(name, 95, typical=True))
    for ending in ("mean", "mean_typical"):
        assert found[f"T_total_{ending}"] == near(sum(found[f"{name}_{ending}"] for name in STAGES.values()))
    assert found["output_tokens_mean"] == near(sum(own.tokens) / len(own.tokens))
    assert (result["num_samples"], result["num_failed_samples"]) == (len(own.samples), own.failed)
    assert result["accuracy"] == near(own.accuracy)


def check_samples(found: Sequence[Mapping[str, Any]], own: Recomputed, ending: str, close: Any) -> None:
    """Of the JSON file or of the CSV."""
    for place, (row, sample) in enumerate(zip(found, own.samples.values(), strict=True)):
        has = {"T_vision_total": sample["runs"][0]["vision_s"] is not None, "T_LLM_decode": own.tokens[place] > 1}
        assert int(row["sample_id"]) == sample["sample_id"] and int(row["output_tokens"]) == own.tokens[place]
        for name in TIMES:
            value, expected = row[f"{name}{ending}"], own.sample_means(name)[place]
            if expected is None or not has.get(name, True):
                assert value in (None, "")
            else:
                assert float(value) == close(expected), name


def share(own: Recomputed, reference: Recomputed) -> float:
    assert own.samples.keys() == reference.samples.keys()
    return own.mean("T_total") / reference.mean("T_total")


def check_settings_row(row: Mapping[str, Any], own: Recomputed, reference: Recomputed, close: Any) -> None:
    for name in TIMES:
        assert float(row[f"{name}_mean_ms"]) == close(own.mean(name)), name
    for percent in (50, 95, 99):
        assert float(row[f"T_total_p{percent}_ms"]) == close(own.percentile("T_total", percent))
    assert float(row["T_total_mean_typical_ms"]) == close(sum(own.typical("T_total")) / len(own.samples))
    for percent in (95, 99):
        assert float(row[f"T_total_p{percent}_typical_ms"]) == close(own.percentile("T_total", percent, typical=True))
    assert float(row["T_total_share_of_reference"]) == close(share(own, reference))
    assert float(row["tokens_per_second"]) == close(sum(own.tokens) / (own.mean("T_total") * len(own.tokens) / 1000))
    assert float(row["requests_per_second"]) == close(1000 / own.mean("T_total"))
    fixed = own.mean("T_first_token") + 4 * own.mean("T_decode_per_token")
    assert (int(row["fixed_length_tokens"]), float(row["T_fixed_length_mean_ms"])) == (5, close(fixed))
    assert (int(row["num_samples"]), int(row["num_failed_samples"])) == (len(own.samples), own.failed)
    assert float(row["accuracy"]) == close(own.accuracy)


def cells_of_page(page: str) -> list[dict[str, str]]:
    """The table of all columns."""
    table = page.partition('<section id="columns">')[2].partition("</table>")[0]

    def texts(row: str, tag: str) -> list[str]:
        found = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", row, re.DOTALL)
        bare = (re.sub(r"<span class=\"more\">.*?</span>|<[^>]+>", "", each, flags=re.DOTALL) for each in found)
        return [html.unescape(each).strip() for each in bare]

    head, *rows = re.findall(r"<tr\b.*?</tr>", table, re.DOTALL)
    headings = texts(head, "th")
    return [dict(zip(headings, [*texts(row, "th"), *texts(row, "td")], strict=True)) for row in rows]


def check_words(row: Mapping[str, str], own: Recomputed, reference: Recomputed) -> None:
    """Cells as people read them, on the page or in the terminal."""
    expected = {
        "vision ms": f"{own.mean('T_vision_total'):.1f}",
        "prefill ms": f"{own.mean('T_LLM_prefill'):.1f}",
        "decode ms": f"{own.mean('T_LLM_decode'):.1f}",
        "total ms": f"{own.mean('T_total'):.1f}",
        "mean ms": f"{own.mean('T_total'):.1f}",
        "p95 ms": f"{own.percentile('T_total', 95):.1f}",
        "P95 ms": f"{own.percentile('T_total', 95):.1f}",
        "ms/token": f"{own.mean('T_decode_per_token'):.2f}",
        "ms a token": f"{own.mean('T_decode_per_token'):.2f}",
        "of reference": "reference" if own is reference else f"{100 * share(own, reference):.0f} %",
        "of reference %": f"{100 * share(own, reference):.0f}",
        "failed": str(own.failed),
        "samples": str(len(own.samples)),
        "tokens out": f"{sum(own.tokens) / len(own.tokens):.1f}",
        "accuracy": f"{own.accuracy:.3f}",
        "GFLOP": f"{own.gflop:.2f}" if "mean ms" in row else f"{own.gflop:.1f}",
    }
    shown = {name: row[name] for name in expected if name in row}
    assert len(shown) >= 8 and shown == {name: expected[name] for name in shown}


# Of the closing table, in order; two have one name, of which the first is of the knob.
HEADINGS = ("vision", "top-k", "blocks", "tokens", "accuracy [95 %]", "vision ms", "prefill ms", "decode ms",
            "total ms", "of reference", "p95 ms", "ms/token", "GFLOP", "MB", "J", "failed")  # fmt: skip


def terminal_rows(output: str) -> list[dict[str, str]]:
    """The closing table, cut where its headings end; cells are right-aligned."""
    lines = output.splitlines()
    at = next(place for place, line in enumerate(lines) if "accuracy [95 %]" in line and "total ms" in line)
    ends, end = [0], 0
    for heading in HEADINGS:
        end = lines[at].index(heading, end) + len(heading)
        ends.append(end)
    own = [line for line in lines[at + 1 : at + 6] if line.split()[0] == "own"]
    return [
        {name: line[ends[place] : ends[place + 1]].strip() for place, name in enumerate(HEADINGS)} for line in own
    ]


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_every_figure_is_the_journals(
    runs: int, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["profile", "--model_path", "unsteady", "--data_file", str(data_file(tmp_path)), "--metric", "em"]
    flags += ["--output_dir", str(folder), "--device", "cpu", "--num_threads", "1", "--top_k_list", "1", "2"]
    flags += ["--num_active_blocks_list", "3", "4", "--num_runs_per_sample", str(runs), "--num_warmup_runs", "0"]
    # INVALID, since a sample failed.
    assert main([*flags, "--max_new_tokens", "5", "--max_repeats", "0"]) == 3
    found = recomputed(tmp_path)
    assert len(found) == 4 and all(own.failed == 1 and len(own.samples) == 7 for own in found.values())
    assert all(len(sample["runs"]) == runs for own in found.values() for sample in own.samples.values())
    reference = found["own_topk2_blocks4"]
    for key, own in found.items():
        (path,) = folder.glob(f"*_imgsize*{key.removeprefix('own')}.json")
        content = json.loads(path.read_text())
        check_aggregates(content, own)
        check_samples(content["per_sample_results"], own, "", near)
    (settings_csv,), (samples_csv,) = folder.glob("*_settings.csv"), folder.glob("*_samples.csv")
    samples = rows_of(samples_csv)
    for row in rows_of(settings_csv):
        check_settings_row(row, found[row["setting"]], reference, in_table)
        mine = [each for each in samples if each["setting"] == row["setting"]]
        check_samples(mine, found[row["setting"]], "_ms", in_table)
        assert {each["num_runs"] for each in mine} == {str(runs)}
    for record in kp.load(folder).frame().to_dict("records"):
        named = {str(name): cell for name, cell in record.items()}
        check_settings_row(named, found[named["setting"]], reference, near)
    terminal = terminal_rows(capsys.readouterr().out)
    assert len(terminal) == 4
    for row in terminal:
        check_words(row, found[f"own_topk{row['top-k']}_blocks{row['blocks']}"], reference)
    page = cells_of_page(kp.load(folder).report().read_text())
    assert len(page) == 4
    for row in page:
        check_words(row, found[row["setting"].split()[0]], reference)
    check_analyses(folder, found, reference)


def check_analyses(folder: Path, found: Mapping[str, Recomputed], reference: Recomputed) -> None:
    """E1, E2, the table of `lookup`, and the frames that E3 fits."""
    sweep = load_sweep(folder)
    stages = analyse_stages(sweep, samples_frame(sweep))
    assert stages is not None
    for regime in stages.by_setting:
        own = found[str(regime.setting)]
        assert regime.total_ms == near(own.mean("T_total"))
        for stage, name in zip(("vision", "prefill", "decode"), STAGES.values(), strict=True):
            assert regime.stages[stage].mean_ms == near(own.mean(name))
        assert stages.share_of_reference(regime) == near(share(own, reference))
    (grid,) = grids_of(sweep)
    for entry in _setting_entries(grid):
        own = found[entry["key"]]
        assert entry["T_total_mean_ms"] == near(own.mean("T_total"))
        assert entry["T_total_p95_ms"] == near(own.percentile("T_total", 95))
    for of in (LATENCY_MEAN, LATENCY_P95):
        front = objectives(grid, of, 50, seed=0)
        assert isinstance(front, Objectives)
        for point, cost in zip(front.points, front.cost.tolist(), strict=True):
            own = found[point.key]
            assert cost == near(own.mean("T_total") if of is LATENCY_MEAN else own.percentile("T_total", 95))
    for choice in build(load_grid([folder])).entries:
        own = found[f"own_topk{choice.top_k}_blocks{choice.num_active_blocks}"]
        assert choice.latency_mean_ms == near(own.mean("T_total"))
        assert choice.latency_median_ms == near(own.percentile("T_total", 50))
    frame = runs_frame(sweep)
    every = sum(sum(map(sum, own.of_runs("T_total"))) for own in found.values())
    assert frame["T_total_ms"].sum() == near(every)
