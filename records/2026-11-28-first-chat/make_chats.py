import json, random

sums = [(a, b) for a in range(10) for b in range(10)]
random.seed(0)
random.shuffle(sums)
with open("chats.jsonl", "w", encoding="utf-8") as file:
    for a, b in sums[10:] * 20:  # ten sums are never shown
        question = {"role": "user", "content": f"What is {a} plus {b}?"}
        answer = {"role": "assistant", "content": f"{a} plus {b} is {a + b}."}
        print(json.dumps({"messages": [question, answer]}), file=file)
print("never shown:", sums[:10])
