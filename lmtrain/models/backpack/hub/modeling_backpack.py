"""Backpack language model for transformers 5, and 4.41 or newer of 4. Load it with `trust_remote_code=True`.

Hewitt et al. 2023, "Backpack Language Models". Each token has E sense vectors that depend on the token alone. A GPT-2
reads the context and gives, for each sense, attention weights over the positions so far. The logits are the products of
the weighted sum of sense vectors with the embedding table:

    sense_l(x)     = the l-th of E vectors made by the sense network from the embedding of x, without its position
    alpha[l, i, j] = softmax_j(q_l(c_i) k_l(c_j) / sqrt(D / E)) with c = GPT-2(x), j <= i
    o_i            = sum over l, j of alpha[l, i, j] sense_l(x_j), divided by E with divide_by_num_senses

    B batch  S query position  T key position  D n_embd  E senses  C width of a sense's query  V vocab
"""

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import GenerationMixin, GPT2Config, GPT2Model, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import CausalLMOutput
from transformers.pytorch_utils import Conv1D


class BackpackConfig(GPT2Config):
    """Settings of GPT-2, which also define the sense network, and those of the senses.

    num_senses: sense vectors per token; must divide n_embd.
    sense_intermediate_scale: hidden dimension of the sense MLP, as a multiple of n_embd.
    divide_by_num_senses: average the sense vectors instead of summing them.
    """

    model_type = "backpack-gpt2"

    def __init__(
        self, num_senses: int = 16, sense_intermediate_scale: int = 4, divide_by_num_senses: bool = False, **kwargs: Any
    ) -> None:
        self.num_senses = num_senses
        self.sense_intermediate_scale = sense_intermediate_scale
        self.divide_by_num_senses = divide_by_num_senses
        published = {"vocab_size": 50264, "n_positions": 512, "scale_attn_by_inverse_layer_idx": True}
        super().__init__(**{"use_cache": False, **published, **kwargs})
        if self.n_embd % num_senses:
            raise ValueError(f"num_senses {num_senses} does not divide n_embd {self.n_embd}")


class Mlp(nn.Module):
    """Two linear layers with GPT-2's activation between them: D -> inner -> outputs."""

    def __init__(self, config: BackpackConfig, inner: int, outputs: int) -> None:
        super().__init__()
        self.c_fc = Conv1D(inner, config.n_embd)
        self.c_proj = Conv1D(outputs, inner)
        self.act = ACT2FN[config.activation_function]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.act(self.c_fc(x)))


class SenseBlock(nn.Module):
    """A residual MLP between two norms."""

    def __init__(self, config: BackpackConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = Mlp(config, config.n_inner or 4 * config.n_embd, config.n_embd)
        self.drop = nn.Dropout(config.resid_pdrop)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ln_2(x + self.drop(self.mlp(self.ln_1(x))))


class SenseNetwork(nn.Module):
    """Sense vectors of tokens: embeddings [B, T, D] -> [B, T, E, D]."""

    def __init__(self, config: BackpackConfig) -> None:
        super().__init__()
        dim, self.num_senses = config.n_embd, config.num_senses
        self.drop_embed = nn.Dropout(config.embd_pdrop)
        self.ln = nn.LayerNorm(dim, eps=config.layer_norm_epsilon)
        self.drop = nn.Dropout(config.resid_pdrop)
        self.block = SenseBlock(config)
        self.final_mlp = Mlp(config, config.sense_intermediate_scale * dim, config.num_senses * dim)

    def forward(self, embedded: torch.Tensor) -> torch.Tensor:
        x = self.drop_embed(embedded)
        x = x + self.drop(self.ln(x))  # the norm's output itself is added, as in the published model
        return self.final_mlp(self.block(x)).unflatten(-1, (self.num_senses, -1))


class SenseWeightNet(nn.Module):
    """Weights of each sense of each earlier token: contexts [B, S, D] -> [B, E, S, T]; rows sum to 1."""

    def __init__(self, config: BackpackConfig) -> None:
        super().__init__()
        self.num_senses = config.num_senses
        self.c_attn = nn.Linear(config.n_embd, 2 * config.n_embd)
        self.drop = nn.Dropout(config.attn_pdrop)

    def forward(self, context: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        both = self.c_attn(context).unflatten(-1, (2, self.num_senses, -1))  # [B, S, 2, E, C]
        q, k = both.permute(2, 0, 3, 1, 4)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None, :].bool()
        # the lowest number instead of -inf: a leading padded position sees no key, and must not become NaN
        scores = scores.float().masked_fill(~seen, torch.finfo(torch.float32).min)
        return self.drop(scores.softmax(-1).to(context.dtype))


class Backpack(nn.Module):
    """Token embeddings [B, S, D] -> weighted sums of sense vectors [B, S, D]."""

    def __init__(self, config: BackpackConfig) -> None:
        super().__init__()
        self.gpt2_model = GPT2Model(config)
        self.sense_network = SenseNetwork(config)
        self.sense_weight_net = SenseWeightNet(config)
        self.divisor = config.num_senses if config.divide_by_num_senses else 1

    def forward(
        self, embedded: torch.Tensor, attention_mask: torch.Tensor | None, **outputs: bool | None
    ) -> tuple[torch.Tensor, Any]:
        """Also returns the GPT-2's outputs; `outputs` are its flags output_attentions and output_hidden_states."""
        position_ids = None
        if attention_mask is not None:  # the first real token is at position 0, with padding on either side
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        context = self.gpt2_model(
            inputs_embeds=embedded,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
            return_dict=True,
            **outputs,
        )
        weights = self.sense_weight_net(context.last_hidden_state, attention_mask)
        return torch.einsum("best,bted->bsd", weights, self.sense_network(embedded)) / self.divisor, context


class BackpackLMHeadModel(PreTrainedModel, GenerationMixin):
    """Backpack with the embedding table as head. It has no cache: generation reads the entire text each time."""

    config_class = BackpackConfig
    supports_gradient_checkpointing = True
    _supports_sdpa = False  # with it, the GPT-2 of transformers 4 forgets scale_attn_by_inverse_layer_idx
    _no_split_modules = ["GPT2Block", "SenseNetwork"]  # noqa: RUF012
    _tied_weights_keys: Any = (
        {"lm_head.weight": "backpack.gpt2_model.wte.weight"}
        if int(transformers.__version__.split(".")[0]) >= 5
        else ["lm_head.weight"]
    )
    # published files also have duplicate names of the embeddings, and old ones GPT-2's causal masks
    _keys_to_ignore_on_load_unexpected = [  # noqa: RUF012
        r"^backpack\.(word|position)_embeddings\.weight$",
        r"\.attn\.(masked_)?bias$",
    ]

    def __init__(self, config: BackpackConfig) -> None:
        super().__init__(config)
        self.backpack = Backpack(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        logits_to_keep: int = 0,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutput | tuple[torch.Tensor, ...]:
        """Logits [B, S, V], or of the last `logits_to_keep` positions only.

        `input_ids` [B, S] or embeddings [B, S, D]; `attention_mask` [B, S] is 0 for padding, on either side. With
        `labels` [B, S], also the mean loss of predicting each label from the tokens before it; -100 is ignored.
        Attentions and hidden states are those of the GPT-2.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        embedded = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        hidden, context = self.backpack(
            embedded, attention_mask, output_attentions=output_attentions, output_hidden_states=output_hidden_states
        )
        logits = self.lm_head(hidden[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten().to(logits.device))
        output = CausalLMOutput(loss, logits, context.hidden_states, context.attentions)
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        """All tokens so far, since there is no cache."""
        passed_on = ("attention_mask", "logits_to_keep", "output_attentions", "output_hidden_states")
        return {"input_ids": input_ids, **{name: kwargs[name] for name in passed_on if name in kwargs}}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_input_embeddings(self) -> nn.Module:
        return self.backpack.gpt2_model.wte

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.backpack.gpt2_model.wte = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    def _init_weights(self, module: nn.Module) -> None:
        """Normal matrices, zero biases; the last matrix of the sense network's block is divided by sqrt(2)."""
        if isinstance(module, (nn.Linear, nn.Embedding, Conv1D)):
            ends_block = module is self.backpack.sense_network.block.mlp.c_proj
            nn.init.normal_(module.weight, std=self.config.initializer_range / (2**0.5 if ends_block else 1))
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        if isinstance(bias := getattr(module, "bias", None), nn.Parameter):
            nn.init.zeros_(bias)
