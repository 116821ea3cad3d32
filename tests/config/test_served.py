"""Servers and models of the command line as pairs with names."""

import pytest

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.config.served import ServedModel, served_models
from experiment_core_utils.primitives.errors import ConfigurationError

HERE, THERE = "http://localhost:8000/v1", "https://models.example/v1/"
AT_A_RATE = ("--endpoint", HERE, "--model", "m", "--request_rate", "2.5")


def test_one_model_at_each_server_each_model_at_one_server_or_pairs() -> None:
    assert served_models((HERE, THERE), ("a/b",)) == (
        ServedModel("localhost-8000", HERE, "a/b"),
        ServedModel("models.example", "https://models.example/v1", "a/b"),
    )
    assert [each.name for each in served_models((HERE,), ("org/Qwen2-0.5B", "q8_0"))] == ["Qwen2-0.5B", "q8-0"]
    assert [(each.name, each.url, each.model) for each in served_models((f"q4={HERE}", f"q8={THERE}"), ("a", "b"))] == [
        ("q4", HERE, "a"),
        ("q8", "https://models.example/v1", "b"),
    ]


def test_port_and_host_are_those_of_the_address() -> None:
    one, other = served_models(("x=http://user:secret@[::1]:9/v1", THERE), ("m",))
    assert (one.host, one.port, other.host, other.port) == ("::1", 9, "models.example", 443)


def test_a_refused_address_is_shown_without_its_password() -> None:
    with pytest.raises(ConfigurationError, match="^--endpoint http://host:eight/v1 is not an address"):
        served_models(("http://me:secret@host:eight/v1",), ("m",))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--endpoint", HERE), "--endpoint needs --model NAME"),
        (("--model", "m"), "--model names a model of the server of --endpoint, which is not given"),
        (("--endpoint", "localhost:8000", "--model", "m"), "localhost:8000 is not an address of a server; give"),
        (("--endpoint", "http://h:eight/v1", "--model", "m"), "is not an address of a server"),
        (("--endpoint", HERE, THERE, "--model", "a", "b", "c"), "2 addresses of --endpoint and 3 names of --model"),
        (("--endpoint", HERE, "http://localhost.8000", "--model", "m"), None),
        (("--endpoint", f"a={HERE}", f"a={THERE}", "--model", "m"), "two servers or models would be called a"),
        (("--endpoint", HERE, "--model", "m", "--precision", "bfloat16"), "--precision cannot act with --endpoint"),
        (("--endpoint", HERE, "--model", "m", "--model_path", "x"), "--model_path cannot act with --endpoint"),
        (("--endpoint", HERE, "--model", "m", "--quantization", "4bit"), "--quantization cannot act with --endpoint"),
        *(
            (("--endpoint", HERE, "--model", "m", flag, "--dry_run"), f"{flag} sees this process alone, and a server")
            for flag in ("--use_profiler", "--use_profiler_on_all_samples", "--memory_timeline")
        ),
        (("--endpoint", HERE, "--model", "m", "--no_chat_template"), "--no_chat_template cannot act: the server of"),
        (("--endpoint", HERE, "--model", "m", "--num_processes", "2"), "--num_processes 2: --endpoint is measured by"),
        (("--request_rate", "2"), "--request_rate is of requests to --endpoint, which is not given; drop it"),
        ((*AT_A_RATE, "--concurrency", "2"), "--request_rate 2.5 and --concurrency 2 are two ways to ask several"),
        ((*AT_A_RATE, "--until_precision", "0.1"), "--until_precision is of requests that run one by one"),
        ((*AT_A_RATE, "--energy", "optional"), "--energy is of requests that run one by one"),
        ((*AT_A_RATE, "--num_latency_samples", "0"), "--num_latency_samples 0 leaves none"),
        ((*AT_A_RATE[:-1], "0"), "--request_rate 0 is not possible; give more than 0, such as 2.5"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(flags: tuple[str, ...], reason: str | None) -> None:
    if reason is None:
        assert len(parse_config(flags).model.served) == 2
        return
    with pytest.raises(ConfigurationError) as found:
        parse_config(flags)
    assert reason in str(found.value) and "\n" not in str(found.value)
