// Reads one case of a set of test vectors, which `python -m attnkit_conformance vectors DIR` writes (docs/vectors.md).
import { readFileSync } from "node:fs";

const KINDS = { float64: Float64Array, float32: Float32Array, int64: BigInt64Array, int32: Int32Array, bool: Uint8Array };

/** {tensors: {name: {x, shape, dtype}}, params: {name: value}}; "allowed.out.o" holds the allowed errors of "out.o". */
export function readCase(folder, wanted) {
  const lines = (name) => readFileSync(`${folder}/${name}`, "utf8").trimEnd().split("\n").map((line) => line.split(" "));
  const tensors = {};
  for (const [id, name, file, offset, size, dtype, shape] of lines("tensors.txt")) {
    if (id !== wanted) continue;
    const bytes = new Uint8Array(readFileSync(`${folder}/${file}`)).slice(+offset, +offset + +size);
    tensors[name] = { x: new KINDS[dtype](bytes.buffer), shape: JSON.parse(shape), dtype };
  }
  if (!Object.keys(tensors).length) throw new Error(`${folder} has no case ${wanted}`);
  const own = lines("params.txt").filter(([id]) => id === wanted);
  return { tensors, params: Object.fromEntries(own.map(([, name, value]) => [name, JSON.parse(value)])) };
}
