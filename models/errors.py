"""The errors of the models package.

ModelError
├── CheckpointError           a checkpoint directory cannot be served; the message names file and tensor
│   ├── MissingFile           no config, no weights, a shard named by the index is not there
│   ├── TruncatedFile         a file ends before its header says so
│   ├── TensorMismatch        a tensor is missing, left over, or has the wrong shape or dtype
│   └── UnsupportedCheckpoint a quantisation, file format or config value we do not serve
├── UnsupportedLayout         a tensor- or expert-parallel degree that the model cannot be cut into
└── BackendError              a step plan that contradicts the backend's slots, blocks or positions
"""


class ModelError(Exception):
    """Base of every error raised by this package."""


class CheckpointError(ModelError):
    """A checkpoint directory cannot be served."""


class MissingFile(CheckpointError):
    """A file that must be there is not."""


class TruncatedFile(CheckpointError):
    """A file is shorter than its own header says (an interrupted download)."""


class TensorMismatch(CheckpointError):
    """A tensor is missing, unexpected, or has another shape or dtype than the config asks for."""


class UnsupportedCheckpoint(CheckpointError):
    """The checkpoint is well formed, but of a kind that is not served."""


class UnsupportedLayout(ModelError):
    """The model cannot be cut into the asked-for number of ranks."""


class BackendError(ModelError):
    """A step plan contradicts the backend's state; an engine bug, never a user's fault."""
