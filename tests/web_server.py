"""A web server of this machine's loopback with ranges and ETags, and with the faults that a test asks for."""

import hashlib
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class WebServer(ThreadingHTTPServer):
    """Serves the files of a folder; `faults` are the answers to the next requests for content, None a right one."""

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.faults = []
        self.ranges = []
        self.authorization = None
        self.tells_version = self.has_ranges = True

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        fault = self.server.faults.pop(0) if self.server.faults else None
        if fault == "hang":
            time.sleep(60)
        if fault == "503":
            self.fail(503)
        elif fault == "redirect":
            self.fail(302, Location=f"{self.server.url}/denied?X-Amz-Signature=hunter2")
        else:
            self.answer(fault)

    def fail(self, status, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def answer(self, fault=None):
        server, path = self.server, self.server.folder / self.path.lstrip("/")
        if server.authorization not in (None, self.headers["Authorization"]):
            return self.fail(401)
        if "denied" in self.path:
            return self.fail(403)
        if not path.is_file():
            return self.fail(404)
        content = path.read_bytes()
        etag = hashlib.sha256(content).hexdigest()[:16]
        asked = self.headers["Range"] if server.has_ranges else None
        if asked:
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            server.ranges.append((path.name, first, last + 1))
            content = content[first : last + 1]
        self.send_response(206 if asked else 200)
        if server.tells_version:
            self.send_header("ETag", f'"{etag}"')
        # A connection that is cut, and a whole answer without content, which would look like the end of the file.
        sent = {"cut": content[: len(content) // 2], "empty": b""}.get(fault, content)
        self.send_header("Content-Length", str(len(sent if fault == "empty" else content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(sent)
        if fault == "cut":
            self.close_connection = True
        return None


@contextmanager
def serving(folder):
    server = WebServer(folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
