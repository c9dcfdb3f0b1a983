"""A handle is a field of pydantic models, and a body and a response of FastAPI, without importing them."""

import copy
import json
import pickle
from typing import Annotated, Any

import msgspec
import pytest
from fastapi import Body, Depends, FastAPI
from fastapi.encoders import jsonable_encoder
from pydantic import BaseModel, TypeAdapter, ValidationError

from aiotensor import TensorHandle, TensorReceiver, TensorSender
from aiotensor.integrations.fastapi import TensorLifespan
from tests.integrations.test_fastapi import http
from tests.pairs import endpoint
from verification.patterns import BIG, pattern

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

HANDLE = TensorHandle("a" * 32, 2**63 - 1, 0, "uint8", (2, 0, 3), "cuda:0")
FIELDS: dict[str, Any] = {
    "sender": "a" * 32,
    "message": 2**63 - 1,
    "tensor": 0,
    "dtype": "uint8",
    "shape": (2, 0, 3),
    "device": "cuda:0",
}


class Job(BaseModel):
    name: str
    handle: TensorHandle
    others: list[TensorHandle] = []
    maybe: TensorHandle | None = None


JOB = Job(name="one", handle=HANDLE, others=[HANDLE, TensorHandle("s", 0, 1, "int8", (), "cpu")])


def test_a_model_with_handles_round_trips_through_json() -> None:
    assert JOB.handle is HANDLE
    assert Job.model_validate_json(JOB.model_dump_json()) == JOB
    assert Job.model_validate(JOB.model_dump()) == JOB
    assert Job.model_validate(json.loads(JOB.model_dump_json())) == JOB
    assert pickle.loads(pickle.dumps(JOB)) == copy.deepcopy(JOB) == JOB
    assert Job.model_validate({"name": "", "handle": HANDLE, "maybe": FIELDS}).maybe == HANDLE


class Anything(BaseModel):
    value: Any
    others: dict[str, object] = {}


def test_all_ways_to_serialize_a_handle_write_the_same_json() -> None:
    adapter = TypeAdapter(TensorHandle)
    assert msgspec.json.decode(adapter.dump_json(HANDLE), type=TensorHandle) == HANDLE
    assert adapter.validate_json(msgspec.json.encode({**FIELDS, "of_a_later_version": 1})) == HANDLE
    model = Anything(value=HANDLE, others={"one": [HANDLE]})
    written = {"value": {**FIELDS, "shape": [2, 0, 3]}, "others": {"one": [{**FIELDS, "shape": [2, 0, 3]}]}}
    assert json.loads(model.model_dump_json()) == model.model_dump(mode="json") == written
    assert model.model_dump() == {"value": FIELDS, "others": {"one": [FIELDS]}}


WRONG: dict[str, tuple[str, object]] = {
    "a number as text": ("message", "7"),
    "a bool": ("tensor", True),
    "a negative tensor": ("tensor", -1),
    "a negative size": ("shape", [2, -1]),
    "a sender that is a number": ("sender", 7),
    "a device that is bytes": ("device", [1]),
}


def test_fields_are_validated_strictly_and_named_in_the_error() -> None:
    for name, (field, value) in WRONG.items():
        wrong = {"name": "", "handle": {**FIELDS, field: value}}
        with pytest.raises(ValidationError) as python:
            Job.model_validate(wrong)
        with pytest.raises(ValidationError) as from_json:
            Job.model_validate_json(json.dumps(wrong))
        for caught in (python, from_json):
            assert {error["loc"][:2] for error in caught.value.errors()} == {("handle", field)}, name


def test_a_handle_can_be_converted_to_a_dict_but_not_iterated() -> None:
    assert dict(HANDLE) == FIELDS
    assert {**HANDLE} == FIELDS
    assert jsonable_encoder({"jobs": [JOB, HANDLE]})["jobs"][1] == {**FIELDS, "shape": [2, 0, 3]}
    with pytest.raises(KeyError, match="keys"):
        HANDLE["keys"]
    with pytest.raises(TypeError, match="not iterable"):
        list(HANDLE)  # type: ignore[call-overload]


async def test_an_endpoint_takes_and_returns_handles() -> None:
    with endpoint("unix") as place:
        engine = TensorLifespan(lambda: TensorSender(place))
        app = FastAPI(lifespan=engine.lifespan)
        engine.install(app)
        here = TensorReceiver(place)

        @app.post("/sent")
        async def sent(sender: Annotated[TensorSender, Depends(engine.sender)]) -> TensorHandle:
            return await sender.send(pattern(3, BIG))

        @app.post("/untyped")
        async def untyped(handle: Annotated[TensorHandle, Body()]):  # type: ignore[no-untyped-def]
            return {"handle": handle, "sum": int((await here.receive(handle)).sum())}

        @app.post("/sum")
        async def total(job: Job) -> int:
            return int((await here.receive(job.handle)).sum())

        async with here, app.router.lifespan_context(app), http(app) as client:
            handle = (await client.post("/sent")).json()
            answer = (await client.post("/untyped", json=handle)).json()
            assert answer == {"handle": handle, "sum": int(pattern(3, BIG).sum())}
            job = {"name": "job", "handle": (await client.post("/sent")).json()}
            assert (await client.post("/sum", json=job)).json() == int(pattern(3, BIG).sum())
            wrong = await client.post("/untyped", json={**handle, "message": "0"})
            assert (wrong.status_code, wrong.json()["detail"][0]["loc"]) == (422, ["body", "message"])
            schema = (await client.get("/openapi.json")).json()
        body = schema["paths"]["/untyped"]["post"]["requestBody"]["content"]["application/json"]
        assert body["schema"]["$ref"] == "#/components/schemas/TensorHandle"
