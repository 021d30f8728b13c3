"""An API whose callers have plans: the rules and keys are in files that `tidegate serve` reads.

$ tidegate serve --config tidegate.toml &
$ pip install ../../clients/python[flask] && python3 app.py
$ curl -i http://127.0.0.1:3002/v1/hello                                  # anonymous, by address
$ curl -i -H 'x-api-key: demo-free-key' http://127.0.0.1:3002/v1/hello    # by key, under its plan
"""

import os

from flask import Flask, g

from tidegate import Tidegate
from tidegate.flask import init_app

app = Flask(__name__)
init_app(app, tidegate=Tidegate(os.environ.get("TIDEGATE_URL", "http://127.0.0.1:8080")))


@app.get("/v1/hello")
def hello():
    # Views need not know about plans: requests over a limit do not reach them.
    return {"message": "hello", "requests_left": g.tidegate.remaining}


@app.get("/healthz")
def healthz():
    return "ok\n"


if __name__ == "__main__":
    app.run(port=int(os.environ.get("PORT", "3002")))
