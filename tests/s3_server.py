"""moto's S3 server on this machine's loopback, with the requests for content counted and with faults."""

import threading
from contextlib import contextmanager

import requests
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Response


class QuietHandler(WSGIRequestHandler):
    def log_request(self, *args):
        pass


class S3Server:
    """`faults` are the statuses of the next answers to requests for content, None a right one."""

    def __init__(self):
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=QuietHandler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.faults = []
        self.ranges = []

    def _answer(self, environ, start_response):
        if environ["REQUEST_METHOD"] == "GET" and "HTTP_RANGE" in environ:
            self.ranges.append((environ["PATH_INFO"], environ["HTTP_RANGE"]))
            fault = self.faults.pop(0) if self.faults else None
            if fault is not None:
                return Response(status=fault)(environ, start_response)
        return self._moto(environ, start_response)

    def demand_credentials(self):
        """From now on, until `reset`, each request needs those of a user that the server knows; it knows none."""
        self._tell("reset-auth", b"0")

    def reset(self):
        """Removes all buckets and forgets requests and faults."""
        self._tell("reset-auth", b"inf")
        self._tell("reset")
        self.faults.clear()
        self.ranges.clear()

    def _tell(self, what, data=b""):
        requests.post(f"{self.url}/moto-api/{what}", data=data, timeout=10).raise_for_status()

    @contextmanager
    def serving(self):
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()
