"""Tracker for MLflow."""

from __future__ import annotations

import json
from contextlib import suppress
from importlib import import_module
from itertools import islice
from types import ModuleType
from typing import Any

from accelerate.base import environ, str_to_bool, wrong_value
from accelerate.logging import get_logger
from accelerate.tracking.base import LibraryTracker, Silence, flatten, on_main_process

logger = get_logger(__name__)


class MLflowTracker(LibraryTracker):
    """Tracker that logs to MLflow, on a server or in files as `MLFLOW_TRACKING_URI` sets.

    The variables `MLFLOW_EXPERIMENT_NAME`, `MLFLOW_RUN_ID`, `MLFLOW_TAGS` (JSON) and `MLFLOW_NESTED_RUN` take
    precedence over the arguments.

    Args:
        experiment_name: Name of the experiment, which is created if needed. None: the default of MLflow.
        logging_dir: Artifact location of a new experiment. None: the default of the server.
        run_id: Existing run to continue.
        tags: Tags of the run by name, or as JSON.
        nested_run: Whether the run is nested in the active one.
        run_name: Name of the run. None: a name chosen by MLflow.
        description: Description of the run.

    Raises:
        ConfigurationError: The tags are not a JSON object.
    """

    name = package = "mlflow"
    title = "MLflow"
    accepts = "number"
    attribute = "active_run"
    active_run: Any
    blocks = True

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name)
        variables = environ.current()
        self.experiment_name = variables.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = logging_dir
        self.run_id = variables.get("MLFLOW_RUN_ID", run_id)
        self.tags = _read_tags(variables.get("MLFLOW_TAGS", tags))
        self.nested_run = bool(str_to_bool(variables.get("MLFLOW_NESTED_RUN", str(bool(nested_run)))))
        self.description = description

    def _open(self, library: ModuleType) -> Any:
        return library.start_run(
            run_id=self.run_id,
            experiment_id=self._find_experiment(),
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Stores hyperparameters, and warns about values that are too long for MLflow."""
        limits = import_module("mlflow.utils.validation")
        longest = limits.MAX_PARAM_VAL_LENGTH
        for name in (name for name, value in values.items() if len(str(value)) > longest):
            logger.warning(f"MLflow does not log {name!r}: its text is longer than {longest} characters")
        rest = iter((name, value) for name, value in values.items() if len(str(value)) <= longest)
        while batch := dict(islice(rest, limits.MAX_PARAMS_TAGS_PER_BATCH)):
            import_module("mlflow").log_params(batch)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs numbers and dictionaries of numbers, and warns about other values.

        `kwargs` are arguments of `mlflow.log_metrics`.
        """
        metrics = {}
        for name, value in flatten(values).items():
            if isinstance(value, int | float):
                metrics[name] = value
            else:
                self._warn_left_out(name, value)
        # The active run depends on the thread, and `log` may run in another thread than `start`.
        run = {"run_id": self.active_run.info.run_id}
        import_module("mlflow").log_metrics(metrics, step=step, **{**run, **kwargs})

    @on_main_process
    def log_figure(self, figure: object, artifact_file: str, **save_kwargs: Any) -> None:
        """Logs a figure.

        Args:
            figure: Figure of matplotlib or plotly.
            artifact_file: Artifact path, such as "plots/loss.png".
            **save_kwargs: Arguments of `mlflow.log_figure`.
        """
        import_module("mlflow").log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Logs all files of a folder.

        Args:
            local_dir: The folder.
            artifact_path: Artifact folder of the files.
        """
        import_module("mlflow").log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Logs a file.

        Args:
            local_path: The file.
            artifact_path: Artifact folder of the file.
        """
        import_module("mlflow").log_artifact(local_path=local_path, artifact_path=artifact_path)

    def finish(self) -> None:
        if not isinstance(self.active_run, Silence):
            import_module("mlflow").end_run()

    def _find_experiment(self) -> str | None:
        """Returns the id of the experiment, which is created if needed."""
        name, mlflow = self.experiment_name, import_module("mlflow")
        if name is None:
            return None
        if (experiment := mlflow.get_experiment_by_name(name)) is not None:
            return str(experiment.experiment_id)
        return str(mlflow.create_experiment(name, artifact_location=self.logging_dir, tags=self.tags))


def _read_tags(tags: dict[str, Any] | str | None) -> dict[str, Any] | None:
    if not isinstance(tags, str):
        return tags
    with suppress(ValueError):
        if isinstance(read := json.loads(tags), dict):
            return read
    raise wrong_value("tags", tags, "it is not a JSON object", 'Write them as {"name": "value"}')
