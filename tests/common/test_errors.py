"""Errors that name a field."""

import pickle

import pytest

from twolane.common.errors import FieldError
from twolane.sampling import SamplingParams
from twolane.slo import Slo


@pytest.mark.parametrize(
    ("make", "field", "problem"),
    [
        (lambda: SamplingParams(top_p=2.0), "top_p", "must be between 0 and 1, not 2.0"),
        (lambda: Slo(tbt=-1.0), "tbt", "must be above 0, not -1.0"),
    ],
)
def test_a_refused_field_is_named_beside_what_is_wrong_with_it(make, field, problem):
    with pytest.raises(FieldError) as caught:
        make()
    assert (caught.value.field, caught.value.problem) == (field, problem)
    assert str(caught.value) == f"{field} {problem}"


def test_a_field_error_survives_the_way_to_another_process():
    error = pickle.loads(pickle.dumps(FieldError("seed", "must be a number")))
    assert (error.field, error.problem) == ("seed", "must be a number")
