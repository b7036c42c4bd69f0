"""The way from the nodes to the SuperLink: Flower's Fleet API, and nothing else.

    python gateway.py --superlink HOST:PORT --secrets FOLDER --signatures FOLDER --port N

Flower 1.41 serves its Fleet, Control and Runtime APIs on one port. It asks who calls on the first
alone: by the key of a node. Whoever reaches the others may register nodes and run code on the
server and on nodes. So nodes reach this gateway and not the SuperLink. It hands on calls of the
Fleet API and refuses all others.

It also adds the signature to each app that a node asks for, as Flower takes signatures from its
own hub alone. A node checks it against its own list: the gateway is not trusted with that.
"""

import argparse
import json
import re
import socket
import ssl
import sys
from pathlib import Path

import httpx
import uvicorn
from flwr.proto.fab_pb2 import GetFabResponse
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

HANDED_ON = re.compile(r"/health|/v1/fleet/[a-z-]+")
GET_APP = "/v1/fleet/get-fab"

OF_A_CONNECTION = {"connection", "host", "keep-alive", "te", "trailer", "transfer-encoding"}
"""Headers between neighbours, which are not handed on."""

SECONDS = 60.0
"""The SuperLink may be silent so long; nodes give a call up after 30 seconds."""


def gateway(superlink: str, authority: Path, signatures: Path) -> Starlette:
    """Returns the application.

    Args:
        superlink: `host:port` of the SuperLink.
        authority: The certificate that the SuperLink's rests on.
        signatures: Folder of `credentials.sign`.
    """
    client = httpx.AsyncClient(
        verify=ssl.create_default_context(cafile=authority),
        timeout=SECONDS,
        # Below the SuperLink's own: a connection that it has closed is not used again.
        limits=httpx.Limits(keepalive_expiry=1.0),
        trust_env=False,
    )

    async def hand_on(request: Request) -> Response:
        path: str = request.scope["path"]
        if not HANDED_ON.fullmatch(path):
            return PlainTextResponse("not a call of Flower's Fleet API", 404)
        headers = [
            (name, value) for name, value in request.headers.items() if name not in OF_A_CONNECTION
        ]
        question = client.build_request(
            request.method,
            f"https://{superlink}{path}",
            headers=headers,
            content=request.stream() if request.method == "POST" else None,
        )
        try:
            answer = await client.send(question, stream=True)
            if path == GET_APP and answer.is_success:
                app = signed(await answer.aread(), signatures)
                return Response(app, media_type=answer.headers.get("content-type"))
        except httpx.TransportError as error:  # Flower's nodes try again after this status
            return PlainTextResponse(f"the SuperLink does not answer: {error}", 503)
        return StreamingResponse(
            answer.aiter_raw(),
            answer.status_code,
            {name: value for name, value in answer.headers.items() if name not in OF_A_CONNECTION},
            background=BackgroundTask(answer.aclose),
        )

    return Starlette(routes=[Route("/{path:path}", hand_on, methods=["GET", "POST"])])


def signed(answer: bytes, signatures: Path) -> bytes:
    """Returns the SuperLink's answer to a node that asks for an app, with the app's signature."""
    response = GetFabResponse.FromString(answer)
    file = signatures / f"{response.fab.hash_str}.json"
    if file.is_file():
        for name, signature in json.loads(file.read_text()).items():
            response.fab.verifications[name] = json.dumps(signature)
    # Without this entry nodes say that the SuperLink knows no signatures, and refuse the app too.
    response.fab.verifications["valid_license"] = "Valid"
    return bytes(response.SerializeToString())


def main() -> int:
    """Reads the command line, and serves."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--superlink", required=True)
    parser.add_argument("--secrets", type=Path, required=True)
    parser.add_argument("--signatures", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int)
    parser.add_argument("--fd", type=int, help="a socket that listens already")
    given = parser.parse_args()
    secrets: Path = given.secrets
    config = uvicorn.Config(
        gateway(given.superlink, secrets / "ca.crt", given.signatures),
        host=given.host,
        port=given.port or 0,
        ssl_certfile=secrets / "server.pem",
        ssl_keyfile=secrets / "server.key",
        log_level="warning",
    )
    sockets = None if given.fd is None else [socket.socket(fileno=given.fd)]
    uvicorn.Server(config).run(sockets)
    return 0


if __name__ == "__main__":
    sys.exit(main())
