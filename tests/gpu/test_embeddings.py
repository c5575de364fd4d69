"""Embeddings on the GPU are those of transformers, beside requests that decode."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from tests.gpu.serving import LEVELS
from tests.gpu.test_broken import SOUND, serve
from twolane.devices import DeviceSettings
from twolane.engine.messages import Output, Submit
from twolane.lanes.cuda.machine import CudaMachine
from twolane.model.load.hub import resolve
from twolane.model.load.weights import load_weights
from twolane.sampling import SamplingParams

EMBEDS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, embeds=True)
TEXTS = [[(7 * i + 3 * j) % 240 + 5 for j in range(1 + 37 * i % 300)] for i in range(12)]


@pytest.mark.parametrize("system", ["static-split", "chunked", "auto"])
def test_embeddings_are_those_of_transformers(checkpoint: Path, system: str) -> None:
    spec, weights = load_weights(resolve(str(checkpoint)), dtype="float32", device="cuda")
    submits = [Submit(f"text {i}", text, EMBEDS) for i, text in enumerate(TEXTS)]
    events = serve(
        CudaMachine(spec, weights, DeviceSettings(model="", levels=LEVELS)),
        system,
        [*SOUND, *submits],
    )
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32)
    for submit in submits:
        [event] = events[submit.id]
        assert isinstance(event, Output) and event.embedding is not None
        got = np.frombuffer(event.embedding, np.float32)
        with torch.no_grad():
            last = model(torch.tensor([submit.prompt])).last_hidden_state[0, -1].numpy()
        np.testing.assert_allclose(got, last, atol=2e-2 * float(np.abs(last).max()))
