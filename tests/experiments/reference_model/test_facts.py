"""Drills of prices: their layout, the loss that the model itself gives, and more of them once enough are known."""

from dataclasses import replace

import pytest
import torch

from experiment_core_utils.tasks.datasets.reference_knowledge import prices
from experiments.reference_model.facts import CONTEXTS, FORMS, PER_SEQUENCE, FactTable
from experiments.reference_model.recipe import OptimiserRecipe
from experiments.reference_model.trainer import Trainer, facts_learned, next_entropy_weight
from tests.experiments.reference_model.tiny import TOKENIZER, tiny_model, tiny_processor

CPU = torch.device("cpu")
RECIPE = replace(
    OptimiserRecipe(),
    first_facts=10,
    facts_growth=1.5,
    fact_tokens=1,
    router_entropy_weight=0.0,
    load_balancing_weight=0.0,
    router_z_weight=0.0,
)


def _trainer(recipe: OptimiserRecipe) -> Trainer:
    tables = [FactTable.of(TOKENIZER, CPU, form, number=20) for form in FORMS]
    return Trainer(tiny_model(), tiny_processor(), recipe, compile_blocks=False, facts=tables)


def _prefix(trainer: Trainer) -> torch.Tensor:
    """Embedded tokens of two pictures."""
    return torch.randn(2, 9, trainer.model.config.text_config.hidden_size)


@pytest.mark.parametrize("form", FORMS)
def test_a_drill_gives_the_code_and_asks_for_the_price(form: str) -> None:
    table = FactTable.of(TOKENIZER, CPU, form, number=20)
    code, price = next(iter(prices().items()))
    assert len(table) == 20
    assert TOKENIZER.decode(table.input_ids[0]) == f"{form.format(code=code)} {price}"
    assert TOKENIZER.decode(table.answers[0, :-1]) == f" {price}"
    assert table.answers[0, -1] == TOKENIZER.eos_token_id
    # The input of the last positions ends one token before what they must say.
    assert torch.equal(table.input_ids[:, 1 - table.answers.shape[1] :], table.answers[:, :-1])
    length = table.input_ids.shape[1]
    ids, answers = table.draw(5, 3, tokens=4 * (1 + 5 + PER_SEQUENCE * length) + 1)
    assert ids.shape == (4, PER_SEQUENCE, length) and answers.shape == (4, PER_SEQUENCE, 4)
    assert {tuple(row) for row in ids.flatten(0, 1).tolist()} == {tuple(row) for row in table.input_ids[:3].tolist()}


@pytest.mark.parametrize(("context", "experts"), [(0, None), (4, 2)])
def test_the_loss_is_that_of_each_drill_alone_after_its_context(context: int, experts: int | None) -> None:
    trainer = _trainer(replace(RECIPE, first_facts=1))
    # One fact and one context: whichever tokens are drawn, every drill is the same.
    prefix = _prefix(trainer)[:1, :1].expand(2, 9, -1)
    table, model = trainer.facts[2], trainer.model
    with torch.no_grad():
        model.train()
        loss, right = trainer.forward_facts(table, context, prefix, experts=experts)
        model.eval()
        drill = model.model.embed(table.input_ids[:1], None)
        states = torch.cat([prefix[:1, : 1 + context], drill], dim=1)
        with model.knobs(top_k=experts):
            logits = model(inputs_embeds=states).logits[:, -table.answers.shape[1] :]
    expected = torch.nn.functional.cross_entropy(logits[0], table.answers[0])
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-4)
    assert float(right) == (logits[0].argmax(dim=-1) == table.answers[0]).all().float()


def test_more_prices_follow_when_enough_are_right() -> None:
    trainer = _trainer(replace(RECIPE, facts_recall=0.0))
    prefix = _prefix(trainer)
    assert facts_learned(trainer, prefix, 0.5)["facts"] == 10
    assert trainer.known_facts == 15
    facts_learned(trainer, prefix, 0.95)
    assert trainer.known_facts == 15  # the end of the training is for what there is
    facts_learned(trainer, prefix, 0.5)
    assert trainer.known_facts == 20  # and there are no more than the table has
    strict = _trainer(replace(RECIPE, facts_recall=1.1))
    facts_learned(strict, prefix, 0.5)
    assert strict.known_facts == 10


def test_the_entropy_weight_follows_what_half_the_experts_recall() -> None:
    recipe = replace(
        RECIPE, half_experts_recall=0.85, entropy_growth=2.0, router_entropy_weight=0.1, most_entropy_weight=0.5
    )
    weights = [0.1]
    # 0.85 of 0.9 is 0.765: with more than that, half the experts lose too little.
    for by_half in (0.8, 0.8, 0.8, 0.75, 0.75, 0.75, 0.75):
        weights.append(next_entropy_weight(recipe, weights[-1], 0.9, by_half))
    assert weights[1:] == pytest.approx([0.2, 0.4, 0.5, 0.25, 0.125, 0.1, 0.1])
    assert next_entropy_weight(recipe, 0.2, 0.6, 0.6) == 0.2  # too little is known to judge by


def test_the_context_grows_when_prices_are_recalled_after_it() -> None:
    untrained = _trainer(RECIPE)
    prefix = _prefix(untrained)
    facts_learned(untrained, prefix, 0.5)
    assert untrained.context_level == 0  # an untrained model knows no price
    trainer = _trainer(replace(RECIPE, context_recall=0.0))
    for level in (1, 2):
        assert f"recall/after {CONTEXTS[level]}" in facts_learned(trainer, prefix, 0.5)
        assert trainer.context_level == level
    for _ in range(10):
        facts_learned(trainer, prefix, 0.5)
    assert trainer.context_level == len(CONTEXTS) - 1
