"""Drills of prices in text: a code is given and its price must follow, after tokens of a picture that do not matter.

A picture is costly and shows a few codes; a step drills thousands of them, which is how the model learns the table. A
model that is only drilled on codes alone never learns where to look, and after a picture it recalls nothing. So the
drills come after more and more embedded tokens of the step's own pictures.
"""

from dataclasses import dataclass
from itertools import islice

import torch
from transformers import PreTrainedTokenizerBase

from experiment_core_utils.tasks.datasets.reference_knowledge import NUMBER_OF_FACTS, prices, question_about
from experiment_core_utils.tasks.datasets.reference_task import prompt_of

# Texts that end before the price; every second step takes the first, which is the shortest.
FORMS = (
    " {code}",
    prompt_of(question_about("red circle")) + " {code}",
    prompt_of("what is the price of {code}?"),
    prompt_of(question_about("blue star")) + " {code}",
)
# Numbers of a picture's tokens before the drills, in the order in which training adds them.
CONTEXTS = (0, 1, 4, 16, 64, 256, 1024)
PER_SEQUENCE = 16  # drills that share a context and do not see each other


@dataclass(frozen=True)
class FactTable:
    """The drills of the trained codes in one form, one row each, in the order of the codes."""

    input_ids: torch.Tensor  #: [F, L] code and price
    answers: torch.Tensor  #: [F, A] tokens that the last A positions must predict: the price and end-of-sequence

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        form: str = FORMS[0],
        number: int = NUMBER_OF_FACTS,
    ) -> "FactTable":
        """The table of the first `number` codes in this form."""
        known = list(islice(prices().items(), number))
        prompts = tokenizer([form.format(code=code) for code, _ in known], add_special_tokens=False)["input_ids"]
        answers = tokenizer([f" {price}" for _, price in known], add_special_tokens=False)["input_ids"]
        ends = torch.full((len(known), 1), tokenizer.eos_token_id)
        values = torch.tensor(answers)
        rows = torch.cat([torch.tensor(prompts), values], dim=1)
        return cls(rows.to(device), torch.cat([values, ends], dim=1).to(device))

    def __len__(self) -> int:
        return len(self.input_ids)

    def draw(self, context: int, known: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random ones of the first `known` drills, as many as fit into `tokens` with a context of `context` tokens for
        each sequence: ids [S, P, L] and answers [S, P, A], P drills to a sequence."""
        length = 1 + context + PER_SEQUENCE * self.input_ids.shape[1]
        count = max(tokens // length, 1)
        chosen = torch.randint(min(known, len(self)), (count, PER_SEQUENCE), device=self.input_ids.device)
        return self.input_ids[chosen], self.answers[chosen]
