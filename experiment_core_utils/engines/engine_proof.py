"""The proof that an engine computes what the model's modules do, with the modules in higher precision as the judge.

Two computations in lower precision differ from each other by the rounding of both, so neither can judge the other. Both
are compared with the modules in float32 (float64 where float32 is the precision) on the same weights, quantised ones
de-quantised. All three give every token to the experts that the engine chose, since where two experts are nearly
equally likely rounding decides between them, and the tokens after that differ rightly. The choices themselves are
judged by the scores in higher precision.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from experiment_core_utils.primitives.errors import EngineRefused, KnobDidNotAct
from experiment_core_utils.primitives.finite_logits import refuse_not_finite

# An engine may be this many times as far from the judge as the modules are, in the mean over all positions. In float32
# the order of sums decides: over 18 proofs of right CPU engines of SmolLM2-135M, whose states have a few very large
# numbers, it was at most 1.9 in the logits, 2.0 in one block's values and, in a run, 3.3 in its keys. One of 32
# positions that is 0.03 % off is more.
MOST_TIMES_THE_MODULES, MOST_TIMES_IN_FLOAT32 = 2.0, 8.0
# So many times, and more by the root of their number, may at least so many tokens of one expert be further off than all
# tokens, beside the modules' quotient, in lower precision. Over 304 proofs of right engines of an H100 (240 in
# bfloat16, 64 in float16) it was at most 1.26 for 16 to 63 tokens, 1.16 for 64 to 255 and 1.06 for more.
MOST_OF_AN_EXPERT, MOST_OF_FEW_TOKENS, FEWEST_TOKENS = 1.1, 2.0, 16
# The fewest positions for a mean: of right engines the first four alone were up to 2.8 times as far as the modules.
FEWEST_POSITIONS = 4

Logits = torch.Tensor


def higher_precision(dtype: torch.dtype) -> torch.dtype:
    """The precision that judges computations in `dtype`: float64 for float32 and above, else float32."""
    return torch.float64 if torch.finfo(dtype).bits >= 32 else torch.float32


class RouterTrace(TorchFunctionMode):
    """A mode that sees each choice of experts, which every family of transformers makes by `topk` of scores [T, E].

    Where its work is captured as a CUDA graph, the ids are in the memory that each replay writes to.

    Args:
        num_experts: E; other uses of `topk` are left alone. None sees nothing.

    Attributes:
        chosen: ids [T, k] of each choice of the last pass, in the order in which the blocks ran.
        scores: what each was chosen from, [T, E]; kept with `keeps_scores`.
    """

    def __init__(self, num_experts: int | None, keeps_scores: bool = False) -> None:
        super().__init__()
        self._num_experts = num_experts
        self._keeps_scores = keeps_scores
        self._forced: Sequence[torch.Tensor] = ()
        self.chosen: list[torch.Tensor] = []
        self.scores: list[torch.Tensor] = []

    @contextmanager
    def of_pass(self, forced: Sequence[torch.Tensor] = ()) -> Iterator[None]:
        """A context of one pass, which forgets the choices before it.

        Args:
            forced: ids of each choice to come, which are what is chosen; those of fewer tokens are the last ones'.
        """
        self._forced, self.chosen, self.scores = forced, [], []
        if self._num_experts is None:
            yield
            return
        with self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "topk":
            return result
        scores = args[0] if args else kwargs["input"]
        if scores.dim() != 2 or scores.shape[1] != self._num_experts:
            return result
        values, ids = result
        if len(self.chosen) < len(self._forced):
            forced = self._forced[len(self.chosen)].to(ids.device, ids.dtype)
            ids = torch.cat([ids[: len(ids) - len(forced)], forced])
            values = scores.gather(1, ids)
        self.chosen.append(ids)
        if self._keeps_scores:
            self.scores.append(scores)
        return torch.return_types.topk((values, ids))


KeysAndValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Computed:
    """What came of a prompt of T tokens and N tokens after it."""

    logits: Sequence[Logits]  #: [1, V] after the prompt and after each token
    #: keys and values of each active block, each [KV, T + N, D], with rotary positions
    cache: Sequence[KeysAndValues]


@dataclass(frozen=True)
class EngineRun:
    """What an engine computed."""

    computed: Computed
    prompt_tokens: int  #: T
    #: ids [T, k] of each choice, pass by pass as the modules repeat them, in the order of the blocks with experts; ids
    #: of fewer tokens are the last ones'; () where they are not known
    experts: Sequence[Sequence[torch.Tensor]] = ()


@dataclass(frozen=True)
class EngineErrors:
    """Distances from the modules in higher precision, relative, as means over positions."""

    engine: float
    modules: float
    positions: int
    #: fraction of the choices of an expert that the judge would have made otherwise; None where they are not known
    other_choices: float | None = None


class TracedPasses:
    """Contexts of the modules' consecutive passes, in which tokens go to the experts that an engine chose.

    Attributes:
        scores: of each pass, what each choice was made from, [T, E].
    """

    def __init__(self, run: EngineRun, num_experts: int | None) -> None:
        self._trace = RouterTrace(num_experts, keeps_scores=True)
        self._experts = iter(run.experts)
        self.scores: list[list[torch.Tensor]] = []

    @contextmanager
    def next(self) -> Iterator[None]:
        """The context of the next pass."""
        with self._trace.of_pass(next(self._experts, ())):
            yield
        self.scores.append(self._trace.scores)


@torch.inference_mode()
def judged_by_modules(
    names: tuple[str, str],
    run: EngineRun,
    judging: AbstractContextManager[None],
    repeat: Callable[[TracedPasses], Computed],
    num_experts: int | None,
    dtype: torch.dtype,
) -> EngineErrors:
    """The errors of an engine and of the modules, once the engine is found right.

    It is right if `is_right` says so of its logits, in the mean over all positions, and of the keys and values of each
    block, as the root of the mean square over the prompt's tokens and over those after it; and if it chose other
    experts than the judge only where the judge's scores are closer than their rounding error. In lower precision the
    logits alone would not show a fault of one block, which is diluted by all blocks after it, and the block's mean not
    that of one expert: there, tokens of no expert may be worse than the others' by more than they are in the modules.

    Args:
        names: of the engine's prefill and decode step, for messages.
        judging: the context in which the modules compute in `higher_precision` of `dtype`.
        repeat: runs the same prompt and tokens by the modules, each pass in a context of its argument.
        num_experts: that routers choose from; None without experts.
        dtype: the precision of the engine and of the modules.

    Raises:
        EngineRefused: the engine is wrong.
        GenerationFailed: the modules' own logits are not finite.
    """
    assert len(run.computed.logits) >= FEWEST_POSITIONS
    plain, judge = TracedPasses(run, num_experts), TracedPasses(run, num_experts)
    rounded = repeat(plain)
    with judging:
        exact = repeat(judge)
    refuse_not_finite(*rounded.logits)
    mine, theirs = ([*map(relative_distance, found.logits, exact.logits)] for found in (run.computed, rounded))
    engine, modules = sum(mine) / len(mine), sum(theirs) / len(theirs)
    if not is_right(engine, modules, dtype):
        # The prefill's fault shows in what follows it, too; a step's does not show in the prefill.
        stage = names[1] if is_right(mine[0], theirs[0], dtype) else names[0]
        raise EngineRefused(_wrong(stage, engine, modules, dtype, f"{len(mine)} positions"))
    _refuse_other_caches(names, run, rounded.cache, exact.cache, dtype)
    if torch.finfo(dtype).bits < 32:
        _refuse_wrong_experts(names, run, rounded.cache, exact.cache)
    choices = _judged_choices(run, plain.scores, judge.scores, _most_times(dtype))
    return EngineErrors(engine, modules, len(mine), choices)


def is_right(engine: float, modules: float, dtype: torch.dtype) -> bool:
    """Whether an engine's error is one of rounding beside the modules' own; never for one that is not a number.

    The modules may be lucky with one prompt, so their error counts at least as much as rounding explains anywhere: in
    lower precision, whose products are summed in float32, half the spacing of numbers; in float32, where roundings add
    up, 16 times as much (the mean over 16 positions was 3 to 16e-7 over the settings of the embedded model).
    """
    unit = torch.finfo(dtype).eps / 2
    return engine <= _most_times(dtype) * max(modules, unit if torch.finfo(dtype).bits < 32 else 16 * unit)


def _most_times(dtype: torch.dtype) -> float:
    return MOST_TIMES_THE_MODULES if torch.finfo(dtype).bits < 32 else MOST_TIMES_IN_FLOAT32


def _wrong(name: str, engine: float, modules: float, dtype: torch.dtype, over: str) -> str:
    return (
        f"the {name} is off by {engine:.3g} from the modules in {_name(higher_precision(dtype))}, where the modules in "
        f"{_name(dtype)} are off by {modules:.3g} (relative, means over {over})"
    )


# Of the root mean square of the logits, times the relative error: two logits that are nearer may change places.
_MOST_OF_A_TIE = 16


def refuse_other_tokens(
    key: str, found: Sequence[int], raw: Sequence[int], logits: Logits, error: float, dtype: torch.dtype
) -> None:
    """Raises KnobDidNotAct where tokens differ from those of the untouched model by more than a tie explains.

    Args:
        key: the name of the setting.
        raw: tokens of the untouched model.
        logits: [N, V] of the untouched model at the positions of `raw`.
        error: relative, of what gave `found`; at least that of rounding, as `is_right` has it, is allowed for.
    """
    place = next((at for at, both in enumerate(zip(found, raw, strict=False)) if both[0] != both[1]), None)
    if place is None:
        if len(found) == len(raw):
            return
        raise KnobDidNotAct(f"{key}: as the model is, it gives {len(found)} tokens, and its own generate() {len(raw)}")
    unit = torch.finfo(dtype).eps / 2
    allowed = max(error, unit if torch.finfo(dtype).bits < 32 else 16 * unit)
    at = logits[place].double()
    margin, most = float(at[raw[place]] - at[found[place]]), _MOST_OF_A_TIE * allowed * float(at.square().mean().sqrt())
    if not margin <= most:
        raise KnobDidNotAct(
            f"{key}: as the model is, its token {place} is {found[place]}, and that of its own generate() is "
            f"{raw[place]}, whose logit is {margin:.3g} larger; rounding explains {most:.3g}"
        )


def relative_distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over that of `exact`, computed in float64."""
    exact = exact.double()
    return float((found.double() - exact).norm() / exact.norm())


def refuse_other_features(
    name: str, found: torch.Tensor, modules: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype
) -> None:
    """Raises EngineRefused for features [N, H] of which the mean error over rows is not one of rounding."""
    scale = exact.double().norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    mine, theirs = (
        float(((features.double() - exact.double()).norm(dim=1) / scale).mean()) for features in (found, modules)
    )
    if not is_right(mine, theirs, dtype):
        raise EngineRefused(_wrong(name, mine, theirs, dtype, f"{len(found)} features"))


def _refuse_other_caches(
    names: tuple[str, str],
    run: EngineRun,
    rounded: Sequence[KeysAndValues],
    exact: Sequence[KeysAndValues],
    dtype: torch.dtype,
) -> None:
    """Raises EngineRefused for keys or values of a block that differ from the judge's by more than rounding."""
    for block, caches in enumerate(zip(run.computed.cache, rounded, exact, strict=True)):
        for what, (mine, theirs, judge) in zip(("keys", "values"), zip(*caches, strict=True), strict=True):
            for name, tokens in zip(names, (slice(run.prompt_tokens), slice(run.prompt_tokens, None)), strict=True):
                engine, modules = (_rms_distance(found[:, tokens], judge[:, tokens]) for found in (mine, theirs))
                if not is_right(engine, modules, dtype):
                    over = f"the tokens' {what} in active block {block}"
                    raise EngineRefused(_wrong(name, engine, modules, dtype, over))


def _rms_distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float(_squared_distances(found, exact).mean().sqrt())


def _squared_distances(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Of each token [T], the squared relative distance of its keys or values [KV, T, D]."""
    exact = exact.double()
    squares = (found.double() - exact).square().sum(dim=(0, 2))
    return squares / exact.square().sum(dim=(0, 2)).clamp(min=torch.finfo(torch.float32).tiny)


def _refuse_wrong_experts(
    names: tuple[str, str], run: EngineRun, rounded: Sequence[KeysAndValues], exact: Sequence[KeysAndValues]
) -> None:
    """Raises EngineRefused where the tokens of an expert are further off than all tokens, beside the same quotient of
    the modules, in the keys or values of the block after it.
    """
    by_block = [torch.cat(ids) for ids in zip(*run.experts, strict=False)]
    if len(by_block) != len(exact):
        return
    for block, ids in enumerate(by_block[:-1]):
        caches = zip(run.computed.cache[block + 1], rounded[block + 1], exact[block + 1], strict=True)
        for mine, theirs, judge in caches:
            if len(ids) != judge.shape[1]:
                continue
            uses = torch.zeros(len(ids), int(ids.max()) + 1, dtype=torch.float64, device=judge.device)
            uses.scatter_(1, ids.to(judge.device), 1.0)
            for name, tokens in zip(names, (slice(run.prompt_tokens), slice(run.prompt_tokens, None)), strict=True):
                counts, quotients = uses[tokens].sum(dim=0), []
                for found in (mine, theirs):
                    squares = _squared_distances(found[:, tokens], judge[:, tokens])
                    quotients.append(uses[tokens].T @ squares / counts / squares.mean())
                worse = (quotients[0] / quotients[1].clamp(min=1)).sqrt().nan_to_num(0.0)
                most = MOST_OF_AN_EXPERT + MOST_OF_FEW_TOKENS / counts.clamp(min=1).sqrt()
                wrong = ((worse > most) & (counts >= FEWEST_TOKENS)).nonzero()
                if len(wrong):
                    expert = int(wrong[0])
                    raise EngineRefused(
                        f"the {name} is off by {float(worse[expert]):.3g} times as much for tokens of expert {expert} "
                        f"in active block {block} as for all tokens, beside the modules"
                    )


def _judged_choices(
    run: EngineRun,
    plain: Sequence[Sequence[torch.Tensor]],
    judge: Sequence[Sequence[torch.Tensor]],
    most_times: float,
) -> float | None:
    """The fraction of the engine's choices that are not the judge's; None where they are not known.

    A choice is refused where the score of an expert that was chosen lies further below the score that it takes to be
    chosen than rounding explains: `most_times` what both scores of the modules are off, as an engine may be.

    Raises:
        EngineRefused: there is such a choice.
    """
    others = total = 0
    for pass_index, chosen_of_pass in enumerate(run.experts):
        for block, chosen in enumerate(chosen_of_pass):
            exact, rounded = (_comparable(scores[pass_index][block][-len(chosen) :]) for scores in (judge, plain))
            ids = chosen.to(exact.device)
            threshold = exact.topk(ids.shape[1], dim=1).values[:, -1:]
            short = (threshold - exact.gather(1, ids)).clamp(min=0)
            off = (rounded - exact).abs().nan_to_num(0.0, 0.0, 0.0).amax(dim=1, keepdim=True)
            allowed = 2 * most_times * torch.maximum(off, off.mean())
            others += int((short > 0).sum())
            total += ids.numel()
            wrong = int((~(short <= allowed)).any(dim=1).sum())
            if wrong:
                raise EngineRefused(
                    f"an engine chose experts for {wrong} of {len(ids)} tokens in block {block} of those with experts "
                    "whose scores are below those of others by more than rounding explains"
                )
    return others / total if total else None


def _comparable(scores: torch.Tensor) -> torch.Tensor:
    """Scores [T, E] as float64, as logarithms where all are positive: a probability's rounding is relative."""
    scores = scores.double()
    return scores.log() if bool((scores > 0).all()) else scores


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
