"""Runs in MLflow and TensorBoard, as these libraries read them back."""

import json
import shutil
import socket
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from scored import row
from tiny import DLG, Here, call, toml

from fedleak.running.dispatch import dispatcher
from fedleak.running.tracking import tracked
from fedleak.store.records import LEAKAGE, LEDGER, UTILITY, LedgerRow
from fedleak.store.run import Key, Run
from fedleak.store.summaries import SUMMARY

CHANGES = {"attack": [DLG], "federation.rounds": 2, "threat.ladder": True}


@pytest.fixture(scope="module")
def ran_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("ran")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(dispatcher, "hire", lambda *_: nullcontext([Here()]))
        Path("small.toml").write_text(toml(CHANGES))
        assert call("run", "small.toml")[0] == 0
    return folder


@pytest.fixture
def run(ran_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    shutil.copytree(ran_once, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    # What an export sets must not outlive the test.
    for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "true")
    return Run(tmp_path / "runs" / "small")


def private_words(run: Run) -> list[str]:
    """Returns the longest word of each private text."""
    assert call("export", str(run.path), "--to", "rows.parquet", "--texts")[0] == 0
    import datasets

    exported = datasets.Dataset.from_parquet("rows.parquet", cache_dir="cache")
    pairs = [pair for cell in exported["pairs"] for pair in json.loads(cell)]
    return sorted({max(pair["text"].split(), key=len) for pair in pairs})


def test_figures_are_those_of_the_files(run: Run) -> None:
    tracked_run, rows, summary = tracked(run), run.rows(LEAKAGE), run.read_document(SUMMARY)
    values = {(metric.name, metric.round): metric.value for metric in tracked_run.metrics}
    assert len(values) == len(tracked_run.metrics)
    for round in (1, 2):
        for name in ("dlg", "dlg+lengths"):
            attack_rows = [
                leakage_row
                for leakage_row in rows
                if (leakage_row.round, leakage_row.attack) == (round, name)
            ]
            scores = [
                text.rougeL for leakage_row in attack_rows for text in leakage_row.texts or ()
            ]
            mean = values[f"attack/{name.replace('+', ':')}/rougeL", round]
            assert mean == pytest.approx(sum(scores) / len(scores))
            controls = [leakage_row.control_rougeL for leakage_row in attack_rows]
            control = values[f"attack/{name.replace('+', ':')}/control_rougeL", round]
            assert control == pytest.approx(sum(controls) / len(controls))
    for utility in run.rows(UTILITY):
        assert values["utility/loss", utility.round] == utility.figures["loss"]
    for end in ("mean", "low", "high"):
        worst = getattr(summary.worst_case.rougeL, end)
        assert values[f"total/any_attack/rougeL/{end}", 2] == worst
    rounds = [values["any_attack/rougeL", round] for round in (1, 2)]
    assert sum(rounds) / 2 == pytest.approx(summary.worst_case.rougeL.mean)
    assert tracked_run.parameters["federation.rounds"] == "2"
    assert tracked_run.parameters["attack.0.kind"] == "dlg"
    assert tracked_run.tags["fedleak.epsilon"] == "none"
    assert tracked_run.tags["fedleak.told"] == "labels, lengths"


def test_the_epsilon_of_a_round_is_that_of_the_client_with_the_largest(run: Run) -> None:
    def spent(round: int, client: int, epsilon: float | str) -> LedgerRow:
        nothing = LedgerRow.nothing_guaranteed(Key(round, client))
        return nothing.model_copy(update={"epsilon": epsilon})

    def epsilons(*rows: LedgerRow) -> dict[int, float]:
        run.write_rows(LEDGER, rows)
        metrics = tracked(run).metrics
        return {
            metric.round: metric.value for metric in metrics if metric.name == "privacy/epsilon"
        }

    rows = [spent(1, 0, 1.0), spent(1, 0, 3.0), spent(1, 1, 2.0), spent(2, 0, 1.5)]
    # Of two statements about a client the smaller counts; who rests in a round has spent its own.
    assert epsilons(*rows) == {1: 2.0, 2: 2.0}
    assert epsilons(*rows, spent(2, 2, "none")) == {1: 2.0}


def test_mlflow_has_settings_figures_by_round_and_a_report_without_texts(run: Run) -> None:
    tracking = pytest.importorskip("mlflow.tracking", reason="MLflow is not installed")
    status, text, errors = call("export", str(run.path), "--to", "mlflow:store")
    assert (status, errors) == (0, "")
    client = tracking.MlflowClient(tracking_uri="store")
    (made,) = client.search_runs([client.get_experiment_by_name("fedleak").experiment_id])
    assert text == f"MLflow has it as run {made.info.run_id}\n"
    assert (made.info.status, made.info.run_name) == ("FINISHED", "small")
    tracked_run = tracked(run)
    assert made.data.params == tracked_run.parameters
    assert made.data.tags.items() >= tracked_run.tags.items()
    for name in {metric.name for metric in tracked_run.metrics}:
        history = client.get_metric_history(made.info.run_id, name)
        expected = [
            (metric.round, metric.value) for metric in tracked_run.metrics if metric.name == name
        ]
        assert [(logged.step, logged.value) for logged in history] == expected
    artifacts = [artifact.path for artifact in client.list_artifacts(made.info.run_id)]
    assert artifacts == ["report-redacted.html"]
    written = b"".join(path.read_bytes() for path in Path("store").rglob("*") if path.is_file())
    words = private_words(run)
    assert len(words) > 1
    assert not [word for word in words if word.encode() in written]
    assert call("export", str(run.path), "--to", "mlflow:store", "--texts")[0] == 0
    (report,) = Path("store").rglob("report.html")
    assert all(word in report.read_text() for word in words)


def test_mlflow_that_is_set_to_nothing_does_not_fill_the_current_folder(run: Run) -> None:
    pytest.importorskip("mlflow.tracking", reason="MLflow is not installed")
    before = set(Path().iterdir())
    status, _, errors = call("export", str(run.path), "--to", "mlflow")
    assert status == 2
    assert "--to mlflow:mlruns" in errors
    assert set(Path().iterdir()) == before


@pytest.mark.slow
def test_what_mlflow_does_not_take_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow.tracking", reason="MLflow is not installed")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    for place in (nobody, "nonsense://x"):
        status, _, errors = call("export", str(run.path), "--to", f"mlflow:{place}")
        assert status == 1, place
        assert errors.startswith("fedleak: MLflow does not take the run: ")
        assert errors.count("\n") == 1


def test_names_of_others_are_no_paths(run: Run) -> None:
    hostile = "../../x\x1b[31m<script>"
    mean = run.read_document(SUMMARY).worst_case.rougeL
    summary = run.read_document(SUMMARY)
    run.write_rows(LEAKAGE, [row(hostile, 0, (True, 100.0, 1.0))])
    attacks = {hostile: summary.attacks["dlg"].model_copy(update={"rougeL": mean})}
    run.write(SUMMARY, summary.model_copy(update={"attacks": attacks, "ladder": None}))
    line = '{"schema_version": 2, "round": 1, "../../../y": 1.0}\n'
    (run.path / "utility.jsonl").write_text(line)
    names = {metric.name for metric in tracked(run).metrics}
    assert "utility/.._.._.._y" in names
    assert "attack/.._.._x__31m_script_/rougeL" in names
    assert not [name for name in names if {"..", ".", ""} & set(name.split("/"))]


def test_tensorboard_has_figures_by_round(run: Run) -> None:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="TensorBoard is not installed",
    )
    status, text, errors = call("export", str(run.path), "--to", "tensorboard:logs")
    assert (status, text, errors) == (0, "for TensorBoard: logs/small\n", "")
    read = accumulators.EventAccumulator("logs/small")
    read.Reload()
    metrics = tracked(run).metrics
    assert set(read.Tags()["scalars"]) == {metric.name for metric in metrics}
    for name in {metric.name for metric in metrics}:
        points = [(event.step, event.value) for event in read.Scalars(name)]
        expected = [(metric.round, metric.value) for metric in metrics if metric.name == name]
        assert [step for step, _ in points] == [step for step, _ in expected]
        assert [y for _, y in points] == pytest.approx([y for _, y in expected], rel=1e-6)
    (settings,) = read.Tensors("settings/text_summary")
    assert b"    federation.rounds = 2" in settings.tensor_proto.string_val[0]
    written = b"".join(path.read_bytes() for path in Path("logs").rglob("*") if path.is_file())
    assert not [word for word in private_words(run) if word.encode() in written]
    status, _, errors = call("export", str(run.path), "--to", "tensorboard:logs")
    assert (status, "delete it, or name another folder" in errors) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["runs/small", "--to", "tensorboard", "--texts"], 2, "leave out --texts"),
        (["nowhere", "--to", "tensorboard"], 2, "is not a run directory"),
        (["nowhere", "--to", "mlflow:store"], 2, "is not a run directory"),
        (["runs/small", "--to", "wandb"], 2, "or name a tracker, mlflow or tensorboard"),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    run: Run, arguments: list[str], status: int, says: str
) -> None:
    exit_status, _, errors = call("export", *arguments)
    assert exit_status == status
    assert says in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("tracker", ["mlflow", "tensorboard"])
def test_a_tracker_that_is_not_installed_says_how_to(
    run: Run, monkeypatch: pytest.MonkeyPatch, tracker: str
) -> None:
    for module in ("mlflow.tracking", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    status, _, errors = call("export", str(run.path), "--to", tracker)
    assert status == 2
    assert f"pip install 'fedleak[{tracker}]'" in errors
