from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adaattn.errors import (
    ArgumentError,
    AssetError,
    DeviceError,
    PolicyError,
    UnsupportedError,
)
from adaattn.evaluation import models, perplexity
from adaattn.evaluation.models import load_model
from adaattn.evaluation.perplexity import EvaluationRequest, evaluate
from adaattn.evaluation.results import EvaluationResult
from adaattn.spec import Method, Policy, Precision

WINDOW, STRIDE, TOKENS = 64, 32, 150


@pytest.fixture(scope="module")
def request_(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> EvaluationRequest:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("Whence is it that Nature doth nothing in vain? " * 5)
    return EvaluationRequest(
        model=str(tiny_model),
        text=str(text),
        tokens=TOKENS,
        window=WINDOW,
        stride=STRIDE,
        device="cpu",
        policies=(
            "quality",
            Policy(name="coarse", error_budget=0.9, precisions=(Precision.BF16,)),
        ),
    )


@pytest.fixture(scope="module")
def names_before() -> set[str]:
    """Return the attention functions of Transformers before any evaluation of this file.

    Converted models of other tests keep theirs, as copies of them go on by it.
    """
    return set(ALL_ATTENTION_FUNCTIONS)


@pytest.fixture(scope="module")
def result(names_before: set[str], request_: EvaluationRequest) -> EvaluationResult:
    return evaluate(request_)


def _plain_losses(request: EvaluationRequest) -> torch.Tensor:
    """The same losses, computed by Transformers alone, window by window."""
    model = AutoModelForCausalLM.from_pretrained(request.model, attn_implementation="sdpa").eval()
    tokenizer = AutoTokenizer.from_pretrained(request.model)
    ids = tokenizer(Path(request.text).read_text())["input_ids"][: request.tokens]
    losses: dict[int, torch.Tensor] = {}
    for begin in range(0, len(ids), request.stride):
        window = torch.tensor([ids[begin : begin + request.window]])
        with torch.inference_mode():
            logits = model(window).logits[0, :-1].double()
        found = torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="none")
        for offset, loss in enumerate(found):
            losses.setdefault(begin + 1 + offset, loss)
    return torch.stack([losses[position] for position in sorted(losses)])


def test_the_loss_is_that_of_transformers_alone(
    result: EvaluationResult, request_: EvaluationRequest
) -> None:
    losses = _plain_losses(request_)
    assert result.scored == losses.numel() == TOKENS - 1
    assert result.run("sdpa").loss == pytest.approx(float(losses.mean()), rel=1e-6)
    assert result.run("sdpa").perplexity == pytest.approx(float(losses.mean().exp()), rel=1e-5)


def test_exact_agrees_with_sdpa_and_quality_with_exact(result: EvaluationResult) -> None:
    assert [run.name for run in result.runs] == ["sdpa", "exact", "quality", "coarse"]
    assert result.run("sdpa").mean_absolute_difference < 1e-4
    assert result.run("quality").mean_absolute_difference < 1e-4
    assert result.run("exact").divergence == 0.0
    assert result.run("exact").methods[0][1] == 1.0


def test_every_run_says_what_each_head_ran_and_why(result: EvaluationResult) -> None:
    for run in result.runs[1:]:
        assert sum(share for _, share in run.methods) == pytest.approx(1.0)
        assert [len(layer) for layer in run.chosen] == [4, 4]
        assert len(run.decisions) == 2
        assert all("error budget" in trace for trace in run.decisions)
    assert result.run("sdpa").methods == ()
    assert result.run("coarse").refusals


def test_costs_are_measured_for_every_run(result: EvaluationResult) -> None:
    for run in result.runs:
        assert run.attention_ms is not None
        assert 0 < run.attention_ms < run.forward_ms
        assert run.attention_ms_low is not None
        assert run.attention_ms_high is not None
        assert 0 < run.attention_ms_low <= run.attention_ms <= run.attention_ms_high


def test_entropy_lies_between_none_and_that_of_uniform_rows(result: EvaluationResult) -> None:
    assert [len(layer) for layer in result.entropy_bits] == [4, 4]
    assert all(0 <= bits <= 6 for layer in result.entropy_bits for bits in layer)
    assert any(bits > 0.5 for layer in result.entropy_bits for bits in layer)


def test_binned_differences_average_to_the_mean_and_json_leaves_single_tokens_out(
    result: EvaluationResult,
) -> None:
    run = result.run("coarse")
    assert len(run.token_differences) == result.scored
    mean = sum(run.token_differences) / result.scored
    assert run.loss_difference == pytest.approx(mean)
    assert run.difference_by_position[0][0] == 1
    assert "token_differences" not in result.to_dict()["runs"][0]
    assert "token_differences" in result.to_dict(with_tokens=True)["runs"][0]


def test_a_wrong_attention_is_seen_in_loss_and_divergence(
    request_: EvaluationRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose hidden states come out ten percent too large must not pass for a good one."""
    plain = perplexity._forward

    def broken(model: object, run: object, inputs: torch.Tensor) -> torch.Tensor:
        hidden = plain(model, run, inputs)
        return hidden * 1.1 if run.name == "quality" else hidden

    monkeypatch.setattr(perplexity, "_forward", broken)
    run = evaluate(request_).run("quality")
    assert run.divergence > 1e-3
    assert run.mean_absolute_difference > 1e-3
    # Values from 0 to the largest: their standard deviation is at most half of it.
    assert 0 < run.divergence_error <= run.max_divergence / 2 / (TOKENS - 2) ** 0.5


def test_progress_counts_every_forward_pass(request_: EvaluationRequest) -> None:
    seen: list[tuple[str, int, int]] = []
    evaluate(request_, progress=lambda *step: seen.append(step))
    passes = [(done, total) for stage, done, total in seen if stage == "evaluate"]
    assert passes[0][0] == 0
    assert passes[-1][0] == passes[-1][1]
    assert [done for done, _ in passes] == list(range(passes[-1][1] + 1))


def test_the_registry_and_the_model_are_left_as_they_were(
    names_before: set[str], result: EvaluationResult
) -> None:
    assert set(ALL_ATTENTION_FUNCTIONS) == names_before
    assert "sdpa" not in ALL_ATTENTION_FUNCTIONS._local_mapping


def test_a_model_that_caps_its_logits_keeps_them_whole(tiny_model: Path) -> None:
    model = load_model(str(tiny_model), device="cpu")
    assert model.head is not None
    network = model.network
    head = network.get_output_embeddings()
    plain = network.forward

    def capped(*args: object, **kwargs: object) -> object:
        output = plain(*args, **kwargs)
        output.logits = torch.tanh(output.logits / 30) * 30
        return output

    network.forward = capped
    assert models._split(network, torch.device("cpu")) == (None, None)
    tokens = torch.arange(8)[None]
    whole = models.LanguageModel(
        name="capped", network=network, tokenizer=None, device=torch.device("cpu")
    )
    with torch.inference_mode():
        rows = whole.forward(tokens)
        assert whole.logits(rows) is rows
        assert not torch.equal(rows, head(network.base_model(tokens).last_hidden_state)[0])


def test_windows_of_a_tokenizer_with_a_start_token_all_begin_with_it(tiny_model: Path) -> None:
    model = load_model(str(tiny_model), device="cpu")

    class Starting:
        bos_token_id = 7

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            ids = [ord(letter) for letter in text]
            return {"input_ids": [7, *ids] if add_special_tokens else ids}

    starting = models.LanguageModel(
        name="", network=None, tokenizer=Starting(), device=torch.device("cpu")
    )
    assert starting.encode("abcd", 3) == ([7], [97, 98, 99])
    assert model.encode("abcd", 3)[0] == []


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "./nowhere"}, AssetError, r"model './nowhere': expected a folder"),
        ({"text": "nowhere.txt"}, AssetError, r"text 'nowhere.txt': expected one of opticks"),
        ({"policies": ("fast",)}, PolicyError, "'fast'"),
        ({"policies": ("quality", "quality")}, ArgumentError, "different names.*got quality"),
        ({"policies": (Policy(name="exact"),)}, ArgumentError, "none sdpa or exact"),
        ({"device": "tpu"}, DeviceError, "tpu"),
        ({"window": 512, "tokens": 512}, ArgumentError, "at most the model's 256 positions"),
    ],
)
def test_bad_input_ends_in_one_typed_error(
    request_: EvaluationRequest,
    changes: dict[str, object],
    error: type[Exception],
    message: str,
    tmp_path: Path,
) -> None:
    from dataclasses import replace

    long_text = tmp_path / "long.txt"
    long_text.write_text("a b c d " * 100)
    with pytest.raises(error, match=message):
        evaluate(replace(request_, **{"text": str(long_text), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"dtype": "int8"}, "dtype: expected one of float32"), ({"stride": 0}, "stride: expected")],
)
def test_impossible_requests_are_refused_before_anything_is_loaded(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        EvaluationRequest(**changes)  # type: ignore[arg-type]


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssetError, match="expected a model that can be loaded"):
        load_model(str(tmp_path), device="cpu")


def test_a_model_outside_the_registry_is_refused(
    request_: EvaluationRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = perplexity._forward

    def deaf(model: object, run: object, inputs: torch.Tensor) -> torch.Tensor:
        hidden = plain(model, run, inputs)
        run.ledger = perplexity.Ledger()
        return hidden

    monkeypatch.setattr(perplexity, "_forward", deaf)
    with pytest.raises(UnsupportedError, match="does not use Transformers' attention registry"):
        evaluate(request_)


def test_policies_may_be_files(request_: EvaluationRequest, tmp_path: Path) -> None:
    from dataclasses import replace

    from adaattn.policies import save_policy

    path = tmp_path / "mine.json"
    save_policy(Policy(name="mine", error_budget=0.1, methods=(Method.EXACT,)), path)
    found = evaluate(replace(request_, policies=(str(path),)))
    assert found.run("mine").error_budget == 0.1


def test_an_unknown_model_without_a_network_fails_at_once_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Transformers tried for three quarters of a minute, a dozen lines of warnings long."""
    import huggingface_hub

    class Unreachable:
        asked = 0

        def head(self, url: str, *, timeout: float) -> None:
            self.asked += 1
            raise OSError(f"{url} cannot be resolved in {timeout} s")

    session = Unreachable()
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    with pytest.raises(AssetError) as caught:
        load_model("no-such/model", device="cpu")
    assert session.asked == 1
    assert str(caught.value) == (
        "model 'no-such/model': expected a model in the hub's cache, since the hub cannot be "
        "reached, got none there; connect to the network (without HF_HUB_OFFLINE), or use "
        '"demo" or a folder'
    )
