from __future__ import annotations

from accelerate.devices.catalogue import NPU
from accelerate.launch.environment import device_ids, environment
from accelerate.launch.machine import Machine
from accelerate.settings.merge import FLAG, Layer, merge


def test_device_ids_are_split() -> None:
    assert device_ids("0, 2") == ("0", "2")
    assert device_ids("all") == device_ids(None) == ()


def test_each_kind_of_hardware_has_its_own_variable_for_visible_devices() -> None:
    settings = merge(Layer(FLAG, {"gpu_ids": "0,2"}))
    assert environment(settings, Machine(NPU, 4), "elastic")["ASCEND_RT_VISIBLE_DEVICES"] == "0,2"
