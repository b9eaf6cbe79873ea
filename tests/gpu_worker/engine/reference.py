"""What transformers answers in fp32, greedily, with the default model's dequantized weights: 64 prompts.

The answers stand in greedy_answers.jsonl, since computing them takes minutes. To make the file anew:
`.venv/bin/python tests/gpu_worker/engine/reference.py`; test_exact.py computes some of them again.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gpu_worker.models.registry import open_checkpoint
from mesh.models import DEFAULT_MODEL, ModelFolder, find

FILE = Path(__file__).with_name("greedy_answers.jsonl")
TOKENS = 24
LEAST_GAP = 1e-3
QUESTIONS = [
    "What is the capital of France?", "Write a haiku about the sea.", "Name three primary colours.", "What is 2 + 2?",
    "Translate 'good morning' to Spanish.", "Who wrote Hamlet?", "Explain gravity to a child.", "List five animals.",
    "What do plants need to grow?", "Give me a recipe for tea.", "What is a prime number?", "Tell me a joke.",
    "Why is the sky blue?", "What is Python?", "How many days has a week?", "日本の首都はどこですか?",
    "¿Cuál es la capital de España?", "Wie heißt die Hauptstadt von Deutschland?", "Столица России — это",
    "2, 3, 5, 7, 11,",
]  # fmt: skip
TEXTS = [
    "The old lighthouse keeper climbed the stairs every evening, one hand on the cold rail, counting the steps aloud "
    "so that he would not think of the storm. From the top he could see the harbour, the fishing boats and, on clear "
    "days, the white line of the far coast where his daughter lived.",
    "def merge(left: list[int], right: list[int]) -> list[int]:\n    merged = []\n    while left and right:\n"
    "        source = left if left[0] <= right[0] else right\n        merged.append(source.pop(0))\n"
    "    return merged + left + right\n\n\ndef sort(values: list[int]) -> list[int]:\n    if len(values) < 2:\n",
    "Die Donau entspringt im Schwarzwald und fließt durch zehn Länder, bevor sie in das Schwarze Meer mündet. Kein "
    "anderer Fluss der Erde berührt so viele Staaten; seit Jahrhunderten ist sie Handelsweg und Grenze zugleich.",
    "La photosynthèse permet aux plantes de transformer la lumière du soleil en énergie chimique. Les feuilles "
    "absorbent le dioxyde de carbone de l'air, et les racines puisent l'eau du sol.",
    '{"name": "shoal", "version": 3, "workers": [{"id": "a1", "gpu": true, "memory_gb": 80}, {"id": "b2", '
    '"gpu": false, "memory_gb": 16}], "limits": {"requests_per_minute": 600, "tokens_per_minute": 90000}}',
    "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。"
    "何でも薄暗いじめじめした所でニャーニャー泣いていた事だけは記憶している。",
    "In 1687 Isaac Newton published three laws of motion. The first says that a body at rest stays at rest unless a "
    "force acts on it; the second, that force equals mass times acceleration; the third, that every action has an "
    "equal and opposite reaction. From these, and from his law of gravitation, he derived the orbits of the planets.",
    "SELECT customers.name, COUNT(orders.id) AS orders, SUM(orders.total) AS spent FROM customers LEFT JOIN orders ON "
    "orders.customer_id = customers.id WHERE orders.created_at >= '2024-01-01' GROUP BY customers.name HAVING",
    "Había una vez un zorro que vivía cerca de un río. Todas las mañanas bajaba a beber y miraba cómo los peces "
    "nadaban contra la corriente. Un día decidió preguntarles por qué no se dejaban llevar.",
    "Ingredients: 250 g flour, 2 eggs, 300 ml milk, a pinch of salt, 50 g butter. Method: 1. Sift the flour and salt "
    "into a bowl. 2. Make a well in the middle and break the eggs into it. 3. Whisk, adding the milk little "
    "by little, until",
    "Мороз и солнце; день чудесный! Ещё ты дремлешь, друг прелестный — пора, красавица, проснись.",
    "#include <stdio.h>\n\nint main(int argc, char **argv) {\n    for (int i = 1; i < argc; i++) {\n"
    '        printf("%d: %s\\n", i, argv[i]);\n    }\n    return 0;\n}\n\n/* Returns the greatest common divisor. */\n',
]  # fmt: skip
# Around the borders of blocks (16 tokens), and up to some twenty blocks. Chosen so that no answer hangs on a near tie:
# the smallest gap of all is above LEAST_GAP, far above what the order of fp32's sums changes.
LENGTHS = [
    1, 2, 3, 5, 8, 14, 15, 16, 17, 20, 24, 29, 31, 32, 33, 37, 42, 47, 48, 49, 55, 60, 63, 64, 65, 70, 79, 80, 81, 90,
    96, 100, 105, 112, 113, 127, 128, 129, 150, 176, 200, 240, 270, 300,
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reference:
    """One greedy answer. `gaps`: by how much the likeliest token's logit was above the second's, at each position."""

    name: str
    prompt: list[int]
    output: list[int]
    gaps: list[float]


def prompts(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """64 of them: questions as chats, and beginnings of texts of 1 to 300 tokens, by name."""
    chats = (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS)
    made = {
        question: tokenizer.encode(chat, add_special_tokens=False).ids
        for question, chat in zip(QUESTIONS, chats, strict=True)
    }
    for index, length in enumerate(LENGTHS):
        texts = " ".join(TEXTS[(index + shift) % len(TEXTS)] for shift in range(len(TEXTS)))
        made[f"{length} tokens of text {index % len(TEXTS)}"] = tokenizer.encode(texts, add_special_tokens=False).ids[
            :length
        ]
    return made


def transformers_model(folder: ModelFolder) -> LlamaForCausalLM:
    """The model with the dequantized weights, made without its own, slow, initialization."""
    checkpoint = open_checkpoint(folder.path)
    settings = {key: value for key, value in checkpoint.config.items() if key not in ("architectures", "qkv_bias")}
    config = LlamaConfig(**settings)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    weights = {name: checkpoint.read(name) for name in checkpoint.names()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model


@torch.inference_mode()
def greedy(model: LlamaForCausalLM, prompt: list[int], tokens: int = TOKENS) -> tuple[list[int], list[float]]:
    """The output's ids, endings included and not heeded, and the gaps, one token after another."""
    ids = torch.tensor([prompt])
    model.generation_config = GenerationConfig(
        max_new_tokens=tokens, do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True
    )
    answer = model.generate(ids, attention_mask=torch.ones_like(ids))
    return answer.sequences[0, len(prompt) :].tolist(), gaps_of(torch.cat(answer.logits))


@torch.inference_mode()
def greedy_along(model: LlamaForCausalLM, prompt: list[int], output: list[int]) -> tuple[list[int], list[float]]:
    """The same from one pass over prompt and output: the ids are `output` if, and only if, that is greedy."""
    logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    return logits.argmax(dim=-1).tolist(), gaps_of(logits)


def gaps_of(logits: torch.Tensor) -> list[float]:
    """The likeliest token's logit less the second's, of each row."""
    best = logits.topk(2, dim=-1).values
    return [round(gap, 5) for gap in (best[:, 0] - best[:, 1]).tolist()]


def references() -> list[Reference]:
    """As the file has them."""
    return [Reference(**json.loads(line)) for line in FILE.read_text().splitlines()]


def main() -> None:
    """Write the file."""
    folder = find(DEFAULT_MODEL)
    model = transformers_model(folder)
    with FILE.open("w") as file:
        for name, prompt in prompts(Tokenizer.from_file(str(folder.tokenizer))).items():
            output, gaps = greedy(model, prompt)
            print(f"{len(prompt):4} tokens, smallest gap {min(gaps):.4f}: {name}")
            file.write(json.dumps(asdict(Reference(name, prompt, output, gaps)), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
