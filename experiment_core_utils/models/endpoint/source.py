"""Models behind servers as a backend."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from experiment_core_utils.config.parts import ModelConfig
from experiment_core_utils.config.served import ServedModel
from experiment_core_utils.knobs.interface import KnobLimits
from experiment_core_utils.knobs.placebo import PLACEBO
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.models.common.preferences import Preferences
from experiment_core_utils.models.endpoint.address import is_loopback, listening_pids
from experiment_core_utils.models.endpoint.floor import floor_line
from experiment_core_utils.models.endpoint.model import EndpointModel
from experiment_core_utils.models.request_work import PlannedRequests, UncountedRequests
from experiment_core_utils.models.source import ModelSource, RequestedModel
from experiment_core_utils.primitives.device import visible_gpus
from experiment_core_utils.primitives.errors import ConfigurationError, SampleError, library_faults_named
from experiment_core_utils.primitives.texts import short_digest
from experiment_core_utils.tasks.interface import Task
from experiment_core_utils.tasks.prompt_forms import prompt_for

_INSIDE = "a request cannot carry it: it is set where the server loads the model"
_UNSUPPORTED = {
    "vision": "the server's processor cuts pictures; send them smaller by --picture_side_list",
    "visual_token_keep": _INSIDE,
    "top_k": _INSIDE,
    "expert_mass": _INSIDE,
    "num_active_blocks": _INSIDE,
}


@dataclass(frozen=True)
class EndpointSource(ModelSource):
    """A model at one server, or at several side by side."""

    served: tuple[ServedModel, ...]
    system_prompt: str | None
    limit_s: float | None = None  #: of the time of each request

    model_type = "endpoint"
    takes_pictures = True
    may_lack_vision = True
    has_chat_template = True
    chat_template_use = "applied"
    prompt_family = "chat"
    score_folder = None
    weight_files = ()

    @property
    def place(self) -> str:
        return ", ".join(f"{each.host}:{each.port}" for each in self.served)

    @property
    def no_energy_reason(self) -> str | None:
        elsewhere = [each.host for each in self.served if not is_loopback(each.host)]
        if elsewhere:
            return f"the server at {elsewhere[0]} is on another machine, whose energy is out of reach"
        return None if visible_gpus() else "the server computes on this machine's CPU, whose energy others use, too"

    @property
    def server_pids(self) -> Sequence[Sequence[int]]:
        return listening_pids(self.served)

    def digest(self) -> str:
        """See `ModelSource.digest`; by names, addresses and models, since weights are out of sight. The first server is
        the reference, so that their order counts.
        """
        return short_digest(repr([(each.name, each.url, each.model) for each in self.served]))

    def decoding_preferences(self) -> Preferences:
        """The server keeps its own."""
        return Preferences()

    def planned_requests(self, task: Task, sample_ids: Sequence[int], limit: int) -> PlannedRequests:
        """The chat template around a prompt is the server's."""
        return UncountedRequests(task, sample_ids, self.prompt_family, "a server shows no architecture")

    def refuse_settings(self, settings: Sequence[Setting], task: Task, sample_ids: Sequence[int], limit: int) -> None:
        """Each setting has to change the request of a sample."""
        model = EndpointModel.unasked(self.name, self.served, self.system_prompt)
        equal = [[each for each in settings if PLACEBO.name not in each.values]]
        for sample_id in sample_ids:
            if not (equal := [group for group in equal if len(group) > 1]):
                return
            try:
                with library_faults_named(f"sample {sample_id}"):
                    sample = task[sample_id]
                    inputs = model.prepare(sample, prompt_for(task, sample, self.prompt_family), None).inputs
            except SampleError:  # named where the run, or its plan, takes it
                continue
            parts: dict[tuple[int, str], list[Setting]] = {}
            for place, group in enumerate(equal):
                for setting in group:
                    model.apply(setting)
                    parts.setdefault((place, model.request(inputs, limit)), []).append(setting)
            equal = list(parts.values())
        for one, other, *_ in (group for group in equal if len(group) > 1):
            raise ConfigurationError(
                f"{one.key} and {other.key} send equal requests in every sample: nothing is turned between them; "
                "drop one of the values (own is as the run sends it by itself)"
            )

    def load(self, config: ModelConfig, device: torch.device, *, is_profiled: bool = False) -> EndpointModel:
        """It raises ConfigurationError as `EndpointModel.probed` does."""
        at_a_time = config.concurrency, config.request_rate
        print(floor_line(), file=sys.stderr, flush=True)
        return EndpointModel.unasked(self.name, self.served, self.system_prompt, *at_a_time, self.limit_s).probed()


def endpoint_source(requested: RequestedModel) -> EndpointSource | None:
    """The requested model where servers are named for it."""
    served = requested.served
    if not served:
        return None
    limits = KnobLimits(None, None, None, _UNSUPPORTED, variants=tuple(each.name for each in served))
    names = dict.fromkeys(each.model for each in served)
    return EndpointSource(", ".join(names), limits, None, served, requested.chat.system_prompt, requested.limit_s)
