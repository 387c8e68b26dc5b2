"""Print what the exported model writes after fixed prompts, by domain, as it comes: greedy and sampled with a seed."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = {
    "Python manual": "# `zipfile` --- Work with ZIP archives\n\n",
    "PostgreSQL manual": "# DROP TABLE\n\nDROP TABLE —",
    "SQLite manual": "The WAL file is",
    "Django manual": "# Forms\n\nDjango's form classes",
    "Perl manual": "The `map` function in Perl",
    "dictionary": "<|endoftext|>lantern\n\nnoun\n",
    "Python signature": "copytree(src, dst",
}
CHATS = [
    ["What does 'abacus' mean?"],
    ["Define river.", "What is the opposite of warm?", "thanks"],
    ["Hello", "Who are you?"],
    ["What does shutil.copyfile do?"],
    ["Give a synonym for happy."],
    ["What is the opposite of victory?"],
    ["Use 'bridge' in a sentence."],
    ["What does the SQL command VACUUM do?"],
    ["What is the Python module json for?"],
    ["What kind of thing is a violin?"],
    ["Who or what is Paris?"],
    ["Write me a poem about the sea."],
    ["What does os.path.join do?"],
    ["What is a compiler?"],
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=120)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()

    def write(ids: list[int], **how: object) -> str:
        torch.manual_seed(args.seed)
        prompt = torch.tensor([ids])
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=args.tokens, **how
        )
        return tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)

    for title, prompt in TEXTS.items():
        print(
            f"## {title}\n\n```text\n{prompt.removeprefix('<|endoftext|>')}[[{write(tokenizer(prompt).input_ids, do_sample=True, temperature=0.7, top_p=0.9)}]]\n```\n"
        )
    for questions in CHATS:
        messages = []
        for question in questions:
            messages.append({"role": "user", "content": question})
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            messages.append({"role": "assistant", "content": write(ids, do_sample=False)})
        print("\n".join(f"{m['role']}: {m['content']}" for m in messages), end="\n\n")


if __name__ == "__main__":
    main()
