"""Prints, for every request that reaches the handler, the paths that Python programs commonly route by."""

import json
import posixpath
from urllib.parse import unquote, urlsplit
from wsgiref.simple_server import WSGIRequestHandler, make_server


class Handler(WSGIRequestHandler):
    def get_environ(self):
        return {**super().get_environ(), "written": self.path}

    def log_message(self, *arguments):
        pass


def application(environ, start_response):
    written = environ["written"].split("?")[0]
    paths = [written, unquote(written), posixpath.normpath(unquote(written)), environ["PATH_INFO"]]
    try:
        paths.append(urlsplit(environ["written"]).path)
    except ValueError:
        pass  # this program would have answered 400
    print(json.dumps(paths), flush=True)
    start_response("200 OK", [("Content-Length", "0")])
    return []


with make_server("127.0.0.1", 0, application, handler_class=Handler) as server:
    print(server.server_port, flush=True)
    server.serve_forever()
