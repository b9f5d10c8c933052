"""Boxes and columns end to end: all scopes and copies, in many schedules, on mapped memory and through the fabric."""

import pytest
import torch

import tilescale_net.runtime.settings as settings
from tests import ranks
from tests.integration.pool import pool_fixture
from tests.integration.rows import WAYS, boxes, leave_the_tensor, random_cases, views_of_padded

near = pool_fixture(2)
far = pool_fixture(2, env={"VIRTUAL_NODES": "2", "TSN_CHAOS": "on"})


@pytest.mark.parametrize("visibility", ["eager", "late", "random"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.sample(3)
def test_mapped_memory(near, dtype, visibility):
    near(boxes, dtype, random_cases(2 * len(WAYS), 11), visibility)


def test_views_of_padded_tensors(near):
    near(views_of_padded)


def test_another_node(far):
    far(boxes, torch.bfloat16, random_cases(2 * len(WAYS), 12), "random")


@pytest.mark.skipif(settings.device_kind() == "cuda", reason="a GPU knows the limits of the heap alone")
@pytest.mark.parametrize("operation", ["put", "put_signal", "get"])
def test_a_row_past_the_end(operation):
    kind, text, _ = ranks.launch(1, leave_the_tensor, operation)[0].error
    assert kind == "OutOfBounds" and "run 4 bytes past the end of empty([48, 72], torch.float32)" in text, text
