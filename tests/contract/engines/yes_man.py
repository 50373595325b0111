"""An engine that agrees to everything, and does nothing: `python yes_man.py PORT`. No test may pass against it."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

AGREEMENT = json.dumps({"success": True, "status": "ok", "message": "ok"}).encode()


class YesMan(BaseHTTPRequestHandler):
    """Answers 200."""

    protocol_version = "HTTP/1.1"

    def agree(self) -> None:
        """Answer 200, whatever was asked."""
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(AGREEMENT)))
        self.end_headers()
        self.wfile.write(AGREEMENT)

    do_GET = do_POST = do_PUT = agree  # noqa: N815 - the names that the standard library looks for

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - as the standard library calls it
        """Say nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), YesMan).serve_forever()
