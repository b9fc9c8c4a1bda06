"""A streaming client for `pagegen serve MODEL`, with the standard library alone.

python examples/serve_client.py [URL]
"""

import json
import sys
import urllib.request


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    with urllib.request.urlopen(f"{url}/models") as response:
        model = json.load(response)["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 32,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as events:
        for line in events:
            data = line.decode().removeprefix("data: ").strip()
            if not data or data.startswith(":") or data == "[DONE]":
                continue
            chunk = json.loads(data)
            for choice in chunk["choices"]:
                print(choice["delta"].get("content", ""), end="", flush=True)
            if chunk["usage"]:
                print(f"\n{chunk['usage']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
