"""Offline generation: several prompts as one continuous batch.

python examples/generate.py [MODEL]
"""

import sys

from pagegen import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time", "def fibonacci(n):"]


def main(model: str = "smollm2-135m") -> None:
    llm = LLM(model)
    params = SamplingParams(max_tokens=24, temperature=0)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        print(f"{prompt!r} -> {output.text!r} ({output.finish_reason})")


if __name__ == "__main__":
    main(*sys.argv[1:])
