"""All published checkpoints that the tests know."""

from tests.support.checkpoints.dense import DENSE
from tests.support.checkpoints.experts import EXPERTS
from tests.support.checkpoints.gemma4 import GEMMA4
from tests.support.checkpoints.hybrid import HYBRID
from tests.support.checkpoints.wrapped import WRAPPED

PUBLISHED = (*DENSE, *EXPERTS, *WRAPPED, *GEMMA4, *HYBRID)
