"""The contract of every tracker, each with a library that records its calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from accelerate import Accelerator
from accelerate.base import PACKAGES, ConfigurationError, MissingPackageError, Package
from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, TRACKERS, Silence, build_tracker

pytestmark = pytest.mark.usefixtures("states")

NAMES = [tracker.name for tracker in TRACKERS]
MODULES = (
    *(tracker.package for tracker in TRACKERS),
    *("mlflow.utils", "mlflow.utils.validation", "dvclive.plots", "torch.utils.tensorboard"),
)
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []


class Recorder:
    """Replaces any object of a library and records calls and assignments."""

    def __init__(self, path: str) -> None:
        self.__dict__["path"] = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder(f"{self.path}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        CALLS.append((f"{self.path}.{name} =", (value,), {}))

    def __setitem__(self, name: str, value: Any) -> None:
        CALLS.append((f"{self.path}[{name}] =", (value,), {}))

    def __call__(self, *args: Any, **kwargs: Any) -> Recorder:
        CALLS.append((self.path, args, kwargs))
        return Recorder(f"{self.path}()")

    def __repr__(self) -> str:
        return f"<{self.path}>"

    def __eq__(self, other: object) -> bool:
        return repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(self.path)


class Library(ModuleType):
    """A library of which every name is a recorder."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder(f"{self.__name__}.{name}")


@pytest.fixture(autouse=True)
def _libraries(states: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    CALLS.clear()
    monkeypatch.setattr(Package, "available", lambda self: True)
    libraries = {name: Library(name) for name in MODULES}
    for name, library in libraries.items():
        monkeypatch.setitem(sys.modules, name, library)
    fill(libraries)
    PartialState(cpu=True)
    yield
    CALLS.clear()


def fill(libraries: dict[str, Any]) -> None:
    """Replace the calls from which trackers need a result."""
    libraries["mlflow"].get_experiment_by_name = lambda name: None
    libraries["mlflow"].create_experiment = record_and_return("mlflow.create_experiment", "7")
    libraries["mlflow"].start_run = record_and_return(
        "mlflow.start_run", SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    )
    libraries["mlflow.utils.validation"].MAX_PARAM_VAL_LENGTH = 10
    libraries["mlflow.utils.validation"].MAX_PARAMS_TAGS_PER_BATCH = 2
    libraries["clearml"].Task = SimpleNamespace(
        current_task=lambda: None, init=record_and_return("clearml.Task.init", Recorder("task"))
    )
    libraries["dvclive.plots"].Metric = SimpleNamespace(
        could_log=lambda value: isinstance(value, int | float | str)
    )


def record_and_return(path: str, value: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        CALLS.append((path, args, kwargs))
        return value

    return call


@pytest.fixture
def _second_process() -> None:
    state = PartialState()
    state._shared_state["process_index"], state._shared_state["num_processes"] = 1, 2
    assert not state.is_main_process


def build(name: str, folder: Any, **kwargs: Any) -> Any:
    return build_tracker(name, "project", str(folder), {name: kwargs})


def started(name: str, folder: Any, **kwargs: Any) -> Any:
    tracker = build(name, folder, **kwargs)
    tracker.start()
    CALLS.clear()
    return tracker


def recorded(of: str = "") -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    noise = (".flush", ".get_logger", ".Text")
    return [call for call in CALLS if not call[0].endswith(noise) and of in call[0]]


@pytest.mark.parametrize("name", NAMES)
def test_the_constructor_starts_nothing(name: str, tmp_path: Any) -> None:
    tracker = build(name, tmp_path)
    assert CALLS == []
    assert isinstance(tracker.tracker, Silence)


STARTS = {
    "tensorboard": ("torch.utils.tensorboard.SummaryWriter", ("LOGS/project",), {}),
    "wandb": ("wandb.init", (), {"project": "project"}),
    "trackio": ("trackio.init", (), {"project": "project"}),
    "swanlab": ("swanlab.init", (), {"project": "project"}),
    "comet_ml": ("comet_ml.start", (), {"project_name": "project"}),
    "aim": ("aim.Run", (), {"repo": "LOGS"}),
    "mlflow": (
        "mlflow.start_run",
        (),
        {
            "run_id": None,
            "experiment_id": "7",
            "run_name": None,
            "nested": False,
            "tags": None,
            "description": None,
        },
    ),
    "clearml": ("clearml.Task.init", (), {"project_name": "project", "task_name": "project"}),
    "dvclive": ("dvclive.Live", (), {}),
}
OPENERS = {name: call[0] for name, call in STARTS.items()}
FURTHER = {
    "wandb": {"entity": "me"},
    "trackio": {"space_id": "r"},
    "swanlab": {"mode": "offline"},
    "comet_ml": {"online": False},
    "aim": {"experiment": "e"},
    "clearml": {"reuse_last_task_id": False},
    "dvclive": {"dir": "d"},
    "tensorboard": {"flush_secs": 5},
}


@pytest.mark.parametrize("name", NAMES)
def test_start_opens_the_run(name: str, tmp_path: Any) -> None:
    tracker = build(name, tmp_path)
    tracker.start()
    path, args, kwargs = STARTS[name]
    folder = str(tmp_path)
    args = tuple(each.replace("LOGS", folder) for each in args)
    kwargs = {key: folder if value == "LOGS" else value for key, value in kwargs.items()}
    assert (path, args, kwargs) in CALLS
    assert not isinstance(tracker.tracker, Silence)


@pytest.mark.parametrize("name", FURTHER)
def test_further_arguments_reach_the_library(name: str, tmp_path: Any) -> None:
    build(name, tmp_path, **FURTHER[name]).start()
    (call,) = (call for call in CALLS if call[0] == OPENERS[name])
    assert call[2].items() >= FURTHER[name].items()


@pytest.mark.parametrize("name", ["wandb", "trackio", "swanlab"])
def test_the_project_can_be_a_further_argument(name: str, tmp_path: Any) -> None:
    build(name, tmp_path, project="other").start()
    assert recorded(f"{name}.init") == [(f"{name}.init", (), {"project": "other"})]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_library_is_one_error(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Package, "available", lambda self: False)
    monkeypatch.setattr(Package, "version", lambda self: None)
    (package,) = (PACKAGES[tracker.package].distributions[0] for tracker in TRACKERS if tracker.name == name)
    with pytest.raises(MissingPackageError, match=f"Tracker needs {package}.*pip install '{package}"):
        build(name, tmp_path).start()


CONFIGURATION = {"lr": 0.1, "layers": 2}
CONFIGURED = {
    "tensorboard": (
        "torch.utils.tensorboard.SummaryWriter().add_hparams",
        (CONFIGURATION,),
        {"metric_dict": {}},
    ),
    **{
        name: (f"{name}.config.update", (CONFIGURATION,), {"allow_val_change": True})
        for name in ("wandb", "trackio", "swanlab")
    },
    "comet_ml": ("comet_ml.start().log_parameters", (CONFIGURATION,), {}),
    "aim": ("aim.Run()[hparams] =", (CONFIGURATION,), {}),
    "mlflow": ("mlflow.log_params", (CONFIGURATION,), {}),
    "clearml": ("task.connect_configuration", (CONFIGURATION,), {}),
    "dvclive": ("dvclive.Live().log_params", (CONFIGURATION,), {}),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_configuration_is_kept(name: str, tmp_path: Any) -> None:
    started(name, tmp_path).store_init_configuration(dict(CONFIGURATION))
    assert recorded() == [CONFIGURED[name]]


VALUES = {"loss": torch.tensor(0.5), "n": np.int64(3), "both": {"a": 1.0}}
WRITER, EXPERIMENT, LIVE = "torch.utils.tensorboard.SummaryWriter()", "comet_ml.start()", "dvclive.Live()"
STEP = {"global_step": 7}
LOGGED = {
    "tensorboard": [
        (f"{WRITER}.add_scalar", ("loss", 0.5), STEP),
        (f"{WRITER}.add_scalar", ("n", 3.0), STEP),
        (f"{WRITER}.add_scalars", ("both", {"a": 1.0}), STEP),
    ],
    **{
        name: [(f"{name}.init().log", ({"loss": 0.5, "n": 3, "both": {"a": 1.0}},), {"step": 7})]
        for name in ("wandb", "trackio", "swanlab")
    },
    "comet_ml": [
        (f"{EXPERIMENT}.set_step", (7,), {}),
        (f"{EXPERIMENT}.log_metric", ("loss", 0.5), {"step": 7}),
        (f"{EXPERIMENT}.log_metric", ("n", 3), {"step": 7}),
        (f"{EXPERIMENT}.log_metrics", ({"a": 1.0},), {"step": 7}),
    ],
    "aim": [
        ("aim.Run().track", (0.5,), {"name": "loss", "step": 7}),
        ("aim.Run().track", (3,), {"name": "n", "step": 7}),
        ("aim.Run().track", (1.0,), {"name": "both/a", "step": 7}),
    ],
    "mlflow": [("mlflow.log_metrics", ({"loss": 0.5, "n": 3, "both/a": 1.0},), {"step": 7, "run_id": "r1"})],
    "clearml": [
        (
            "task.get_logger().report_scalar",
            (),
            {"title": title, "series": series, "value": v, "iteration": 7},
        )
        for title, series, v in (("loss", "train", 0.5), ("n", "train", 3), ("both", "a", 1.0))
    ],
    "dvclive": [
        (f"{LIVE}.step =", (7,), {}),
        (f"{LIVE}.log_metric", ("loss", 0.5), {}),
        (f"{LIVE}.log_metric", ("n", 3), {}),
        (f"{LIVE}.log_metric", ("both/a", 1.0), {}),
        (f"{LIVE}.next_step", (), {}),
    ],
}


@pytest.mark.parametrize("name", NAMES)
def test_logged_tensors_are_converted_to_numbers(name: str, tmp_path: Any) -> None:
    started(name, tmp_path).log(VALUES, step=7)
    assert recorded() == LOGGED[name]


@pytest.mark.parametrize("name", NAMES)
def test_arguments_of_the_library_are_passed_on(name: str, tmp_path: Any) -> None:
    started(name, tmp_path).log({"loss": 1.0}, step=7, extra="x")
    assert any(call[2].get("extra") == "x" for call in recorded())


@pytest.mark.parametrize("name", NAMES)
def test_finish_ends_the_run(name: str, tmp_path: Any) -> None:
    tracker = started(name, tmp_path)
    tracker.finish()
    (call,) = recorded()
    assert call[0].rpartition(".")[2] in {"close", "finish", "end", "end_run"}
    assert call[1:] == ((), {})


@pytest.mark.usefixtures("_second_process")
@pytest.mark.parametrize("name", NAMES)
def test_other_processes_reach_no_library(name: str, tmp_path: Any) -> None:
    tracker = build(name, tmp_path)
    tracker.start()
    tracker.store_init_configuration({"lr": 1})
    tracker.log({"loss": 1.0}, step=1)
    for method, arguments in (
        ("log_images", ({"digits": []},)),
        ("log_table", ("t", ["a"], [[1]])),
        ("log_artifact", ("file",)),
        ("log_artifacts", ("folder",)),
        ("log_figure", ("figure", "file.png")),
    ):
        if hasattr(tracker, method):
            getattr(tracker, method)(*arguments)
    tracker.tracker.log({"loss": 1})
    tracker.finish()
    assert CALLS == []
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_second_process")
@pytest.mark.parametrize("name", ["wandb", "trackio", "swanlab"])
def test_trackers_may_start_on_every_process(name: str) -> None:
    LOGGER_TYPE_TO_CLASS[name]("project").start()  # type: ignore[call-arg]
    assert recorded(f"{name}.init")


def test_an_accelerator_logs_to_all_trackers(tmp_path: Any) -> None:
    accelerator = Accelerator(cpu=True, log_with="all", project_dir=tmp_path)
    assert [str(name) for name in accelerator.log_with] == NAMES
    accelerator.init_trackers("project", config={"lr": 1}, init_kwargs={"wandb": {"entity": "me"}})
    assert recorded("wandb.init") == [("wandb.init", (), {"project": "project", "entity": "me"})]
    loss = torch.tensor(1.0)
    accelerator.log({"loss": loss}, step=1, log_kwargs={"wandb": {"commit": False}})
    loss.zero_()
    accelerator.log({"loss": loss}, step=2)
    accelerator.end_training()
    assert recorded("wandb.init().log") == [
        ("wandb.init().log", ({"loss": 1.0},), {"step": 1, "commit": False}),
        ("wandb.init().log", ({"loss": 0.0},), {"step": 2}),
    ]
    assert [call[1][0] for call in recorded("mlflow.log_metrics")] == [{"loss": 1.0}, {"loss": 0.0}]
    assert [call[1][1] for call in recorded("Live().log_metric")] == [1.0, 0.0]
    assert [
        call[0] for call in CALLS if "end_run" in call[0] or "finish" in call[0] or ".end" in call[0]
    ] == [
        "wandb.init().finish",
        "trackio.init().finish",
        "comet_ml.start().end",
        "mlflow.end_run",
        "dvclive.Live().end",
        "swanlab.init().finish",
    ]


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_images_are_converted_to_those_of_the_library(name: str, tmp_path: Any) -> None:
    started(name, tmp_path).log_images({"digits": ["one", "two"]}, step=5, extra=1)
    assert recorded("Image") == [(f"{name}.Image", (each,), {}) for each in ("one", "two")]
    image = Recorder(f"{name}.Image()")
    assert CALLS[-1] == (f"{name}.init().log", ({"digits": [image, image]},), {"step": 5, "extra": 1})


def test_images_of_aim_have_captions_and_two_kinds_of_arguments(tmp_path: Any) -> None:
    arguments = {"aim_image": {"format": "png"}, "track": {"context": {"set": "val"}}}
    tracker = started("aim", tmp_path)
    tracker.log_images({"one": ("pixels", "a digit"), "many": ["p", ("q", "c")]}, step=5, kwargs=arguments)
    assert recorded("Image") == [
        ("aim.Image", ("pixels",), {"caption": "a digit", "format": "png"}),
        ("aim.Image", ("p",), {"caption": "", "format": "png"}),
        ("aim.Image", ("q",), {"caption": "c", "format": "png"}),
    ]
    image, where = Recorder("aim.Image()"), {"step": 5, "context": {"set": "val"}}
    assert recorded("track") == [
        ("aim.Run().track", (image,), {"name": "one", **where}),
        ("aim.Run().track", ([image, image],), {"name": "many", **where}),
    ]


def test_texts_of_aim_are_its_own(tmp_path: Any) -> None:
    started("aim", tmp_path).log({"note": "warm"}, step=1)
    assert ("aim.Text", ("warm",), {}) in CALLS
    assert recorded("track") == [("aim.Run().track", (Recorder("aim.Text()"),), {"name": "note", "step": 1})]


def test_a_run_of_aim_has_its_name(tmp_path: Any) -> None:
    build("aim", tmp_path).start()
    assert CALLS[-1] == ("aim.Run().name =", ("project",), {})


def test_tables_of_wandb(tmp_path: Any) -> None:
    started("wandb", tmp_path).log_table("table", columns=["a"], data=[[1]], step=6)
    assert [
        ("wandb.Table", (), {"columns": ["a"], "data": [[1]], "dataframe": None}),
        ("wandb.init().log", ({"table": Recorder("wandb.Table()")},), {"step": 6}),
    ] == CALLS


def test_texts_of_comet_are_no_metrics(tmp_path: Any) -> None:
    started("comet_ml", tmp_path).log({"note": "warm", "odd": [1]})
    assert [(f"{EXPERIMENT}.log_other", ("note", "warm"), {})] == CALLS


@pytest.mark.parametrize(
    ("table", "shown"),
    [
        ({"columns": ["a"], "data": [[1]]}, [["a"], [1]]),
        ({"data": [[1]]}, [[1]]),
        ({"dataframe": "frame"}, "frame"),
    ],
)
def test_tables_of_clearml(table: dict[str, Any], shown: Any, tmp_path: Any) -> None:
    started("clearml", tmp_path).log_table("eval_table", step=6, **table)
    wanted = {"title": "table", "series": "eval", "table_plot": shown, "iteration": 6}
    assert recorded() == [("task.get_logger().report_table", (), wanted)]


def test_a_table_of_clearml_has_rows(tmp_path: Any) -> None:
    with pytest.raises(ConfigurationError, match="Pass data or dataframe"):
        started("clearml", tmp_path).log_table("table", columns=["a"])


def test_the_series_of_clearml_is_the_beginning_of_a_name(tmp_path: Any) -> None:
    tracker = started("clearml", tmp_path)
    tracker.log({"eval_loss": 1.0, "train_loss": 2.0, "eval/loss": 3.0}, step=1)
    assert [(call[2]["title"], call[2]["series"]) for call in recorded()] == [
        ("loss", "eval"),
        ("loss", "train"),
        ("eval/loss", "train"),
    ]


def test_without_a_step_clearml_has_single_values_and_texts(tmp_path: Any) -> None:
    started("clearml", tmp_path).log({"best": 1.0, "by": {"a": 2.0}, "note": "warm", "odd": [1]})
    assert recorded() == [
        ("task.get_logger().report_single_value", (), {"name": "best", "value": 1.0}),
        ("task.get_logger().report_single_value", (), {"name": "by/a", "value": 2.0}),
        ("task.get_logger().report_text", ("note: warm",), {}),
    ]


def test_images_of_clearml_in_a_list_have_a_series_each(tmp_path: Any) -> None:
    started("clearml", tmp_path).log_images({"eval_digits": ["p", "q"], "one": "r"}, step=2)
    assert [(call[2]["title"], call[2]["series"], call[2]["image"]) for call in recorded()] == [
        ("digits", "eval_0", "p"),
        ("digits", "eval_1", "q"),
        ("one", "train", "r"),
    ]


def test_a_running_task_of_clearml_is_taken_and_left_open(tmp_path: Any) -> None:
    sys.modules["clearml"].Task.current_task = lambda: Recorder("theirs")  # type: ignore[attr-defined]
    tracker = started("clearml", tmp_path)
    assert repr(tracker.tracker) == "<theirs>"
    tracker.finish()
    assert CALLS == []


@pytest.mark.parametrize(
    ("given", "variables", "names"),
    [
        ({"task_name": "t"}, {}, ("project", "t")),
        ({"project_name": "p"}, {}, ("p", "project")),
        ({"task_name": "t"}, {"CLEARML_PROJECT": "vp", "CLEARML_TASK": "vt"}, ("vp", "vt")),
    ],
)
def test_names_of_a_task_of_clearml(
    given: dict[str, Any], variables: dict[str, str], names: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    build("clearml", tmp_path, **given).start()
    assert recorded() == [("clearml.Task.init", (), {"project_name": names[0], "task_name": names[1]})]


def test_a_given_live_of_dvclive_is_used(tmp_path: Any) -> None:
    live = Recorder("mine")
    tracker = started("dvclive", tmp_path, live=live)
    assert tracker.tracker is live
    tracker.log({"loss": 1.0, "odd": [1]})
    assert CALLS == [("mine.log_metric", ("loss", 1.0), {}), ("mine.next_step", (), {})]


def test_parameters_of_mlflow_are_sent_in_batches_and_long_ones_give_a_warning(
    tmp_path: Any, caplog: Any
) -> None:
    started("mlflow", tmp_path).store_init_configuration({"a": 1, "b": 2, "long": "x" * 11, "c": 3})
    assert recorded() == [
        ("mlflow.log_params", ({"a": 1, "b": 2},), {}),
        ("mlflow.log_params", ({"c": 3},), {}),
    ]
    assert "MLflow does not log 'long': its text is longer than 10 characters" in caplog.text


def test_only_numbers_are_metrics_of_mlflow(tmp_path: Any, caplog: Any) -> None:
    started("mlflow", tmp_path).log({"loss": 1.0, "note": "warm"})
    assert recorded()[0][1] == ({"loss": 1.0},)
    assert "MLflow does not log 'note': a str is not a number" in caplog.text


def test_files_and_figures_of_mlflow(tmp_path: Any) -> None:
    tracker = started("mlflow", tmp_path)
    tracker.log_figure("figure", "loss.png", save_kwargs={"dpi": 50})
    tracker.log_artifact("file", "models")
    tracker.log_artifacts("folder")
    assert CALLS == [
        (
            "mlflow.log_figure",
            (),
            {"figure": "figure", "artifact_file": "loss.png", "save_kwargs": {"dpi": 50}},
        ),
        ("mlflow.log_artifact", (), {"local_path": "file", "artifact_path": "models"}),
        ("mlflow.log_artifacts", (), {"local_dir": "folder", "artifact_path": None}),
    ]


def test_an_experiment_of_mlflow_that_exists_is_used(tmp_path: Any) -> None:
    experiment = SimpleNamespace(experiment_id=77)
    sys.modules["mlflow"].get_experiment_by_name = lambda name: experiment  # type: ignore[attr-defined]
    build("mlflow", tmp_path, tags='{"a": "b"}', run_name="r", logging_dir="s3://x").start()
    ((_, _, kwargs),) = recorded("mlflow.start_run")
    assert (kwargs["experiment_id"], kwargs["tags"], kwargs["run_name"]) == ("77", {"a": "b"}, "r")
    assert recorded("create_experiment") == []


def test_a_new_experiment_of_mlflow_has_the_artifact_location(tmp_path: Any) -> None:
    build("mlflow", tmp_path, logging_dir="s3://x").start()
    assert recorded("create_experiment") == [
        ("mlflow.create_experiment", ("project",), {"artifact_location": "s3://x", "tags": None})
    ]


def test_variables_of_mlflow_take_precedence(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"EXPERIMENT_NAME": "theirs", "RUN_ID": "r9", "TAGS": '{"e": "f"}', "NESTED_RUN": "1"}
    for variable, value in variables.items():
        monkeypatch.setenv(f"MLFLOW_{variable}", value)
    tracker = build("mlflow", tmp_path, run_id="mine", tags={"a": "b"})
    assert (tracker.experiment_name, tracker.run_id) == ("theirs", "r9")
    assert (tracker.tags, tracker.nested_run) == ({"e": "f"}, True)


@pytest.mark.parametrize("tags", ["{", "[1]"])
def test_tags_of_mlflow_are_an_object(tags: str, tmp_path: Any) -> None:
    with pytest.raises(ConfigurationError, match="tags=.*it is not a JSON object"):
        build("mlflow", tmp_path, tags=tags)
