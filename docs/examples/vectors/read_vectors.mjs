// Reads one case of a set of test vectors, which `python -m attnkit_conformance vectors DIR` writes (docs/vectors.md).
import { closeSync, openSync, readFileSync, readSync } from "node:fs";

const KINDS = { float64: Float64Array, float32: Float32Array, int64: BigInt64Array, int32: Int32Array, bool: Uint8Array };

/** A case that a reader does not know how to read, or a program how to compute. */
export class Refusal extends Error {}

/** {tensors: {name: {x, shape, dtype}}, params: {name: value}}; "allowed.out.o" holds the allowed errors of "out.o". */
export function readCase(folder, wanted) {
  const lines = (name) => readFileSync(`${folder}/${name}`, "utf8").trimEnd().split("\n").map((line) => line.split(" "));
  const tensors = {};
  for (const [id, name, file, offset, size, dtype, shape, ...more] of lines("tensors.txt")) {
    if (id !== wanted) continue;
    if (shape === undefined || more.length) throw new Refusal(`${id}: a line of tensors.txt has not seven fields`);
    if (!(dtype in KINDS)) throw new Refusal(`${id}: ${name} has dtype ${dtype}; known are ${Object.keys(KINDS).join(", ")}`);
    tensors[name] = { x: new KINDS[dtype](readBytes(`${folder}/${file}`, +offset, +size)), shape: JSON.parse(shape), dtype };
    const entries = tensors[name].shape.reduce((product, n) => product * n, 1);
    if (tensors[name].x.length !== entries) throw new Refusal(`${id}: ${name} has ${size} bytes, which are not ${shape} of ${dtype}`);
  }
  if (!Object.keys(tensors).length) throw new Refusal(`${folder} has no case ${wanted}`);
  const own = lines("params.txt").filter(([id]) => id === wanted);
  return { tensors, params: Object.fromEntries(own.map(([, name, value]) => [name, JSON.parse(value)])) };
}

function readBytes(path, offset, size) {
  const bytes = new Uint8Array(size);
  const file = openSync(path);
  const read = readSync(file, bytes, 0, size, offset);
  closeSync(file);
  if (read !== size) throw new Refusal(`${path} ends before byte ${offset + size}`);
  return bytes.buffer;
}
