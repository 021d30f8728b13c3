"""redis-py with the RESP listener: python3 redis-py.py PORT PROTOCOL"""

import json
import sys

import redis

client = redis.Redis(port=int(sys.argv[1]), protocol=int(sys.argv[2]), client_name="redis-py", socket_timeout=30)
name = f"redis-py {sys.argv[2]}"
replies = {"pong": "PONG" if client.ping() else "no reply"}
replies["check"] = client.execute_command("TIDEGATE.CHECK", name, "5/h")[:4]
replies["throttle"] = client.execute_command("CL.THROTTLE", name, 1, 1, 3600)
replies["several"] = client.execute_command("TIDEGATE.CHECK", name, "6/h", name, "7/day", "COST", 2)
replies["request"] = [client.execute_command("TIDEGATE.REQUEST", "GET", f"/{name[-1]}", "203.0.113.9") for _ in range(2)]
replies["wait"] = client.execute_command("TIDEGATE.WAIT", f"{name}:wait", "1/s", "TIMEOUT", 100)[:2]
client.execute_command("TIDEGATE.WAIT", f"{name}:slow", "1/s token-bucket", "TIMEOUT", 0)
replies["waited"] = client.execute_command("TIDEGATE.WAIT", f"{name}:slow", "1/s token-bucket", "TIMEOUT", 9000)[:2]
try:
    client.execute_command("TIDEGATE.CHECK", name, "5/fortnight")
except redis.ResponseError as error:
    replies["error"] = f"ERR {error}"

checks = client.pipeline(transaction=False)
for _ in range(100):
    checks.execute_command("TIDEGATE.CHECK", f"{name}:pipeline", "37/h")
replies["admitted"] = sum(allowed for allowed, *_ in checks.execute())

throttles = client.pipeline(transaction=False)
for _ in range(100):
    throttles.execute_command("CL.THROTTLE", f"{name}:pipeline", 18, 1, 3600)
replies["throttled"] = sum(limited for limited, *_ in throttles.execute())

print(json.dumps(replies, default=bytes.decode))
client.close()
