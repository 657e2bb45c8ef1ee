"""Old import path of the installation of torch_xla."""

from accelerate.devices import install_xla as install_xla
