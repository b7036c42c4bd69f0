"""What a plan refuses and what it says: data and model are known, and nothing is written."""

from pathlib import Path

import pytest

from fedleak.config.loading import parse
from fedleak.running import preparation
from fedleak.util.errors import ConfigError


@pytest.fixture
def plan(tmp_path):
    """Plans an experiment on lines of a csv file."""

    def make(
        lines, model="builtin/bert-tiny", task="sequence-classification", label="label", **data
    ):
        (tmp_path / "a.csv").write_text("\n".join(["text,label", *lines]), encoding="utf-8")
        table = {
            "name": "a",
            "model": {"name": model, "task": task},
            "data": {
                "name": str(tmp_path / "a.csv"), "text": "text", "label": label, "samples": 8,
                "held_out": 0,
            } | data,
            "federation": {"clients": 2, "batch_size": 2},
        }  # fmt: skip
        return preparation.plan(parse(table))

    return make


GOOD = [f"the patient has pain {i},{i % 2}" for i in range(8)]
EMOJI = [f"{chr(0x1F600 + i)} {chr(0x1F610 + i)},{i % 2}" for i in range(8)]


def test_texts_of_unknown_tokens_are_refused_with_their_share(plan):
    with pytest.raises(ConfigError) as caught:
        plan(EMOJI)
    assert "100% of the 16 tokens of 8 texts are unknown" in str(caught.value)
    assert "choose a model" in str(caught.value)
    assert "\U0001f600" not in str(caught.value)


def test_a_share_of_unknown_tokens_is_said(plan):
    (remark,) = plan([*GOOD[:6], *EMOJI[6:]]).remarks
    assert "% of the tokens are unknown words" in remark
    assert plan(GOOD).remarks == ()


def test_texts_without_tokens_are_refused(plan):
    """BERT's tokenizer drops what is not printed, and a causal model has nothing to predict."""
    with pytest.raises(ConfigError, match=r"1 of 8 texts have no token: .* remove them"):
        plan([*GOOD[:7], "\u200b\u200b,1"])


def test_dropped_rows_and_batches_that_are_no_batches_are_said(plan):
    planned = plan([*GOOD, ",1", " ,0"], drop_empty=True)
    assert planned.remarks == ("2 rows without text were dropped",)
    table = planned.experiment.model_dump(mode="json")
    table["federation"]["batch_size"] = 500
    table["model"]["lora"] = {"rank": 2}
    (_, remark, adapters) = preparation.plan(parse(table)).remarks
    assert adapters.startswith("in round 1 one factor of each LoRA adapter is zero")
    assert "batch_size = 500" in remark
    assert "2 of 2 clients" in remark
    assert "4 examples" in remark


def test_remarks_are_kept_in_the_run(plan, tmp_path):
    planned = plan([*GOOD, ",1"], drop_empty=True)
    run = preparation.open_run(planned, tmp_path / "run")
    assert run.info()["remarks"] == list(planned.remarks)


@pytest.mark.parametrize("label", ["label", "no such column", None])
def test_the_classes_of_a_causal_models_data_do_not_matter(plan, label):
    lines = [f"the patient has pain {i},same" for i in range(8)]
    planned = plan(lines, "builtin/gpt2-tiny", "causal-lm", label)
    assert planned.num_labels == 1
    with pytest.raises(ConfigError, match="1 distinct values"):
        plan(lines)


def test_nothing_is_written_by_a_plan_that_is_refused(plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        plan(EMOJI)
    assert [path.name for path in Path().iterdir()] == ["a.csv"]


def test_a_run_does_not_go_on_with_more_rows_than_it_was_made_with(plan, tmp_path):
    run = preparation.open_run(plan([*GOOD, *GOOD], samples=None, held_out=None), tmp_path / "run")
    assert run.info()["examples"] == {"training": 13, "held_out": 3}
    preparation.open_run(plan([*GOOD, *GOOD], samples=None, held_out=None), run.path)
    with pytest.raises(ConfigError, match=r"13 training and 3 held-out examples.* 19 and 5 now"):
        preparation.open_run(plan([*GOOD, *GOOD, *GOOD], samples=None, held_out=None), run.path)
