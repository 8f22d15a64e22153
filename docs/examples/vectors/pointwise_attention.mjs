// ReLU attention, relu(q kᵀ/√d)/S · v, held against its test vectors, without packages:
//
//   node pointwise_attention.mjs VECTORS pointwise_attention/float32/small-cross mine.safetensors
//
// It serves plain cases: q, k and v of four axes and one batch, single or double precision, without parameters. It refuses
// all others by what it does not know, with exit status 2, shows the largest error relative to what is allowed (exit status
// 1 if that is exceeded), and writes what it read and computed for `python -m attnkit_conformance compare VECTORS
// mine.safetensors`.
import { writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

import { readCase, Refusal } from "./read_vectors.mjs";

const KNOWN = ["in.q", "in.k", "in.v", "out.o", "allowed.out.o"];
const DTYPES = ["float32", "float64"];

function attend({ x: q, shape: [B, H, L, d] }, { x: k, shape: [, , S] }, { x: v, shape: [, , , e] }) {
  const o = new q.constructor(B * H * L * e);
  for (let row = 0; row < B * H * L; row++) {
    const first = Math.floor(row / L) * S;
    const sums = new Float64Array(e);
    for (let j = first; j < first + S; j++) {
      let s = 0;
      for (let c = 0; c < d; c++) s += (q[row * d + c] * k[j * d + c]) / Math.sqrt(d);
      for (let c = 0; c < e; c++) sums[c] += (Math.max(s, 0) / S) * v[j * e + c];
    }
    o.set(sums, row * e);
  }
  return o;
}

/** A safetensors file: the length of a JSON header, the header, the bytes. */
function writeTensors(path, tensors) {
  let offset = 0;
  const header = Object.entries(tensors).map(([name, { x, shape, dtype }]) => [
    name, { dtype: { float64: "F64", float32: "F32" }[dtype], shape, data_offsets: [offset, (offset += x.byteLength)] },
  ]);
  const text = new TextEncoder().encode(JSON.stringify(Object.fromEntries(header)));
  const length = new Uint8Array(new BigUint64Array([BigInt(text.length)]).buffer);
  const data = Object.values(tensors).map(({ x }) => new Uint8Array(x.buffer));
  writeFileSync(path, Buffer.concat([length, text, ...data]));
}

/** Throws a Refusal unless a case is one of those that `attend` computes. */
function requirePlain(id, { tensors, params }) {
  const refuse = (text) => { throw new Refusal(`${id}: ${text}`); };
  for (const name of Object.keys(params)) refuse(`the parameter ${name} is not known`);
  for (const name of Object.keys(tensors)) {
    const ofGradients = name.startsWith("cotangent.") || name.includes("grad.");
    if (!ofGradients && !KNOWN.includes(name)) refuse(`the tensor ${name} is not known`);
  }
  const [q, k, v, o, allowed] = KNOWN.map((name) => tensors[name] ?? refuse(`there is no tensor ${name}`));
  for (const name of KNOWN) {
    const { shape, dtype } = tensors[name];
    if (shape.length !== 4) refuse(`${name} has ${shape.length} axes; only 4 are known`);
    if (!DTYPES.includes(dtype)) refuse(`${name} has dtype ${dtype}; only ${DTYPES.join(" and ")} are known`);
    if (shape[0] !== q.shape[0] || shape[1] !== q.shape[1]) refuse(`${name} has other batches or heads than in.q, ${shape}`);
  }
  const [L, d, S, e] = [q.shape[2], q.shape[3], k.shape[2], v.shape[3]];
  const fits = k.shape[3] === d && v.shape[2] === S && o.shape[2] === L && o.shape[3] === e && allowed.x.length === o.x.length;
  if (!fits || q.dtype !== k.dtype || q.dtype !== v.dtype) refuse("q, k, v and o do not fit together");
}

/** {wrong, share, mine}: wrong entries, the largest error relative to what is allowed, and what to write. */
export function judge(folder, id) {
  if (!id.startsWith("pointwise_attention/")) throw new Refusal(`${id}: only pointwise_attention is known`);
  const held = readCase(folder, id);
  requirePlain(id, held);
  const { "in.q": q, "in.k": k, "in.v": v, "out.o": golden, "allowed.out.o": allowed } = held.tensors;
  const o = attend(q, k, v);
  let [wrong, share] = [0, 0];
  o.forEach((x, n) => {
    const gap = x === golden.x[n] ? 0 : Math.abs(x - golden.x[n]);
    if (!(gap <= allowed.x[n])) wrong++; // NaN as well
    if (gap > 0) share = Math.max(share, gap / allowed.x[n]);
  });
  return { wrong, share, mine: { "in.q": q, "in.k": k, "in.v": v, "out.o": { x: o, shape: golden.shape, dtype: q.dtype } } };
}

function main([folder, id, out]) {
  if (out === undefined) throw new Refusal("expected VECTORS CASE OUT, a folder of test vectors, one of its cases, and a file to write");
  const { wrong, share, mine } = judge(folder, id);
  const count = mine["out.o"].x.length;
  console.log(`${id}: ${wrong} of ${count} entries wrong, max error ${share.toPrecision(3)} of what is allowed`);
  writeTensors(out, Object.fromEntries(Object.entries(mine).map(([name, x]) => [`${id}/${name}`, x])));
  return wrong ? 1 : 0;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  try {
    process.exitCode = main(process.argv.slice(2));
  } catch (error) {
    console.error(error instanceof Refusal ? error.message : error);
    process.exitCode = 2;
  }
}
