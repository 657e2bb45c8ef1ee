"""MLflow."""

from __future__ import annotations

import json
from contextlib import suppress
from importlib import import_module
from itertools import islice
from typing import Any

from accelerate.base import environ, str_to_bool, wrong_value
from accelerate.logging import get_logger
from accelerate.tracking.base import LibraryTracker, flatten, on_main_process

logger = get_logger(__name__)


class MLflowTracker(LibraryTracker):
    """Logs to MLflow: a server, or files, as `MLFLOW_TRACKING_URI` says.

    The variables `MLFLOW_EXPERIMENT_NAME`, `MLFLOW_RUN_ID`, `MLFLOW_TAGS` (JSON) and `MLFLOW_NESTED_RUN` win
    over the arguments.

    Args:
        experiment_name: Name of the experiment; made where there is none. None: MLflow's own choice.
        logging_dir: Where a new experiment keeps its artifacts; None: where the server says.
        run_id: An existing run to go on with.
        tags: Tags of the run, by name, or as JSON.
        nested_run: Whether the run is nested in the active one.
        run_name: Name of the run; None: MLflow chooses one.
        description: Its description.

    Raises:
        ConfigurationError: The tags are no JSON object.
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

    def _open(self, library: Any) -> Any:
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
        """Store hyperparameters; one longer than MLflow takes is left out with a warning."""
        limits = import_module("mlflow.utils.validation")
        longest = limits.MAX_PARAM_VAL_LENGTH
        for name in (name for name, value in values.items() if len(str(value)) > longest):
            logger.warning(f"MLflow leaves out {name!r}: its text is longer than {longest} characters")
        rest = iter((name, value) for name, value in values.items() if len(str(value)) <= longest)
        while batch := dict(islice(rest, limits.MAX_PARAMS_TAGS_PER_BATCH)):
            import_module("mlflow").log_params(batch)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and dictionaries of numbers; leave out others with a warning.

        `kwargs` are arguments of `mlflow.log_metrics`.
        """
        metrics = {}
        for name, value in flatten(values).items():
            if isinstance(value, int | float):
                metrics[name] = value
            else:
                self._warn_left_out(name, value)
        # Threads have an active run each, and this may be called in another one than `start`.
        run = {"run_id": self.active_run.info.run_id}
        import_module("mlflow").log_metrics(metrics, step=step, **{**run, **kwargs})

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Log a figure.

        Args:
            figure: Of matplotlib or plotly.
            artifact_file: Its path among the artifacts, such as "plots/loss.png".
            **save_kwargs: Arguments of `mlflow.log_figure`.
        """
        import_module("mlflow").log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Log all files of a folder.

        Args:
            local_dir: The folder.
            artifact_path: Their folder among the artifacts.
        """
        import_module("mlflow").log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Log a file.

        Args:
            local_path: The file.
            artifact_path: Its folder among the artifacts.
        """
        import_module("mlflow").log_artifact(local_path=local_path, artifact_path=artifact_path)

    @on_main_process
    def finish(self) -> None:
        import_module("mlflow").end_run()

    def _find_experiment(self) -> str | None:
        """The experiment's identifier, of a new one where there is none of that name."""
        name, mlflow = self.experiment_name, import_module("mlflow")
        if name is None:
            return None
        if (known := mlflow.get_experiment_by_name(name)) is not None:
            return str(known.experiment_id)
        return str(mlflow.create_experiment(name, artifact_location=self.logging_dir, tags=self.tags))


def _read_tags(tags: dict[str, Any] | str | None) -> dict[str, Any] | None:
    if not isinstance(tags, str):
        return tags
    with suppress(ValueError):
        if isinstance(read := json.loads(tags), dict):
            return read
    raise wrong_value("tags", tags, "it is no JSON object", 'Write them as {"name": "value"}')
