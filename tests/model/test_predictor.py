"""What predicts further tokens (MTP) says what its public definition says.

`transformers` leaves it out, so the reference is put together of its modules as vLLM's
`qwen3_next_mtp` and `qwen3_5_mtp` put them together.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

from tests.model.checkpoints import _for_hybrid, _initialise, load_decoder, make_checkpoint
from tests.model.checkpoints import reference as whole
from tests.model.passes import PAGE, Pool, close, prompt
from tests.model.published import publish
from twolane.model.attention import Batch, Segment
from twolane.model.decoder import Decoder
from twolane.model.load.hub import resolve
from twolane.model.load.weights import load_predictor

LAYERS = {"qwen3-next": Qwen3NextDecoderLayer, "qwen3.5": Qwen3_5DecoderLayer}


class Reference(nn.Module):
    """vLLM's definition, with the embeddings, the rotation and the classifier of the model."""

    def __init__(self, model: PreTrainedModel, kind: type[nn.Module]) -> None:
        super().__init__()
        text = model.config.get_text_config()
        attends = text.layer_types.index("full_attention")
        if text.model_type == "qwen3_next":
            text.mlp_only_layers = []
        self.layers = nn.ModuleList([kind(text, attends)])
        norm, hidden = type(self.layers[0].input_layernorm), text.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        names = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        for name in names:
            self.add_module(name, norm(hidden, eps=text.rms_norm_eps))

    def forward(self, model: PreTrainedModel, hidden: Tensor, tokens: Tensor) -> Tensor:
        """The logits [T, vocab] after tokens [T], given the model's hidden states before them."""
        embedded = model.get_input_embeddings()(tokens)
        parts = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)
        x = self.fc(torch.cat(parts, dim=-1))[None]
        places = torch.arange(len(tokens))[None]
        base = model.model.language_model if hasattr(model.model, "language_model") else model.model
        turn = base.rotary_emb(x, places)
        mask = torch.full((len(tokens),) * 2, -torch.inf).triu(1)[None, None]
        out = self.layers[0](x, turn, attention_mask=mask, position_ids=places)
        out = out[0] if isinstance(out, tuple) else out
        return model.lm_head(self.norm(out))[0]


@pytest.mark.parametrize("family", LAYERS)
def test_logits_are_those_of_the_definition(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path / "model", seed=1)
    model, tokens = whole(path), prompt(41)
    torch.manual_seed(7)
    wanted = Reference(model, LAYERS[family]).eval()
    with torch.no_grad():
        for name, parameter in wanted.named_parameters():
            _initialise(f".{name}", parameter, tied=False)
            _for_hybrid(f".{name}", parameter, bare=False)
    stored = load_file(path / "model.safetensors")
    stored |= {f"mtp.{name}": tensor for name, tensor in wanted.state_dict().items()}
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    source = resolve(str(path))
    decoder = load_decoder(source)
    predictor = load_predictor(source, decoder.weights)
    assert predictor is not None
    assert predictor.weights.embedding is decoder.weights.embedding
    with torch.inference_mode():
        hidden = model(tokens[None], output_hidden_states=True).hidden_states[-1][0, :-1]
        want = wanted(model, hidden, tokens[1:])
        drafts = Decoder(predictor.spec, predictor.weights)
        x, pool = predictor.joined(decoder.embed(tokens[1:]), hidden), Pool(drafts)
        pages, logits = pool.take(40), []
        for start, n in ((0, 30), *((30 + i, 1) for i in range(10))):
            batch = Batch.build([Segment(start, n, pages)], PAGE)
            logits.append(drafts.head(drafts.layer(0, x[start : start + n], batch, pool.kv)))
    close(torch.cat(logits), want)


def test_published_blocks_of_fp8_are_kept(tmp_path: Path) -> None:
    path = publish("qwen3-next", tmp_path / "fp8", tmp_path / "floats")
    source = resolve(str(path))
    weights = load_decoder(source).weights
    predictor = load_predictor(source, weights)
    assert predictor is not None
    [layer] = predictor.weights.layers
    own = weights.layers[-1]
    assert layer.qkv.scheme == own.qkv.scheme == "fp8_row128"
    assert layer.mlp.down.scheme == own.mlp.down.scheme
    plain = make_checkpoint("qwen3-next", tmp_path / "none", seed=1)
    assert load_predictor(resolve(str(plain)), weights) is None
