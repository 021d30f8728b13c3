/**
 * Determines the client's address behind proxies.
 *
 * Each proxy appends the address of its own peer to a header, so the entries on the right were written by trusted
 * machines, and the walk begins there. The first entry that is not a trusted proxy is the client. Entries further left
 * come from the client and are not read. An entry that is not an address ends the walk at the previous hop: skipping it
 * would expose a forged entry to its left. So every mistake ends at an address nearer to this server.
 *
 *     X-Forwarded-For:  6.6.6.6,         198.51.100.7,      10.0.0.2          peer 10.0.0.1
 *                       sent by the      not trusted,       trusted           trusted
 *                       client: ignored  so the client                        ◀── the walk begins here
 *
 * An address is parsed into bits, because one client has many notations: `203.0.113.9`, `::ffff:203.0.113.9`,
 * `[::ffff:cb00:7109]:4711`. An IPv6 client owns a whole /64, so the network is counted.
 */
import { isIPv4, isIPv6 } from "node:net";

import { InvalidInputError, quoted } from "./errors.js";

const ENTRIES_MAX = 100;
const HEADER_BYTES_MAX = 16 * 1024;
const NODE_BYTES_MAX = 128;
const NETWORK_BYTES_MAX = 64;
const IPV6_PREFIX_BITS = 64n;

/** An IP address: its family and its bits. */
export interface Address {
  readonly family: 4 | 6;
  readonly bits: bigint;
}

interface Network extends Address {
  readonly prefix: number;
}

/** IPv6 networks whose addresses contain an IPv4 address: the network, and the number of bits before the address. */
const EMBEDDING: readonly (readonly [bigint, number])[] = [
  [0xffffn << 32n, 96], // IPv4-mapped
  [0x0064_ff9bn << 96n, 96], // translated (RFC 6052)
  [0x2002n << 112n, 16], // 6to4 (RFC 3056)
];

/** The proxies that are trusted to report client addresses, and the header in which they do. */
export class TrustedProxies {
  readonly #networks: readonly Network[];
  /** The name of the header, in lower case. */
  readonly header: string;

  /**
   * @throws {InvalidInputError} if a string is neither an address nor `ADDRESS/BITS`, has host bits set, or the header
   * cannot hold an address.
   */
  constructor(networks: readonly string[] = [], header = "x-forwarded-for") {
    if (!Array.isArray(networks)) throw new InvalidInputError("trustedProxies must be a list such as [\"10.0.0.0/8\"]");
    this.#networks = networks.map(parseNetwork);
    this.header = String(header).toLowerCase();
    if (!/^[!#$%&'*+\-.^_`|~0-9a-z]+$/.test(this.header) || /^x-forwarded-(host|port|proto)$/.test(this.header)) {
      throw new InvalidInputError(
        `forwardingHeader must name one header with an address: X-Forwarded-For, Forwarded, or one such as ` +
          `CF-Connecting-IP (found ${quoted(header)})`,
      );
    }
  }

  /** Returns the client's address, given the peer of the socket and all lines of the forwarding header, in order. */
  clientAddress(peer: Address, lines: readonly string[]): Address {
    let hop = canonical(peer);
    if (!this.#trusts(hop)) return hop;
    for (const entry of hopsFromRight(this.header, lines)) {
      if (!entry) break;
      hop = entry;
      if (!this.#trusts(hop)) break;
    }
    return hop;
  }

  #trusts(address: Address): boolean {
    if (this.#networks.length === 0) return false;
    const embedded = embeddedV4(address);
    return this.#networks.some((network) => contains(network, embedded) || contains(network, address));
  }
}

/** Yields the address of each entry from right to left, or `undefined` for an entry that is not an address. */
function* hopsFromRight(header: string, lines: readonly string[]): Generator<Address | undefined> {
  const isForwarded = header === "forwarded";
  let [entries, bytes] = [ENTRIES_MAX, HEADER_BYTES_MAX];
  for (let index = lines.length - 1; index >= 0; index--) {
    const whole = lines[index]!;
    let rest: string | undefined = whole.slice(Math.max(0, whole.length - bytes));
    const isCut = rest.length < whole.length;
    bytes -= rest.length;
    while (rest !== undefined) {
      if (entries-- === 0) return;
      const comma: number = isForwarded ? lastForwardedComma(rest) : rest.lastIndexOf(",");
      // The leftmost entry of a line that exceeds the bound may be incomplete.
      if (comma < 0 && isCut) {
        yield undefined;
        return;
      }
      const entry: string = rest.slice(comma + 1);
      rest = comma < 0 ? undefined : rest.slice(0, comma);
      const node = isForwarded ? parseFor(entry) : entry;
      yield node === undefined ? undefined : parseNode(node);
    }
  }
}

/**
 * Parses an entry of a forwarding header: an address, with or without port, brackets and zone. Returns `undefined` for
 * everything else. IPv4-mapped addresses are returned as IPv4.
 */
export function parseNode(entry: string): Address | undefined {
  if (entry.length > NODE_BYTES_MAX) return undefined;
  const text = entry.replace(/^[ \t]+|[ \t]+$/g, "");
  const bracketed = /^\[([^\]]*)\](?::(.*))?$/.exec(text);
  if (bracketed) {
    if (bracketed[2] !== undefined && !isPort(bracketed[2])) return undefined;
    return parseV6(bracketed[1]!);
  }
  const colons = text.split(":").length - 1;
  if (colons === 0) return parseV4(text);
  if (colons > 1) return parseV6(text);
  const [host, port] = text.split(":") as [string, string];
  return isPort(port) ? parseV4(host) : undefined;
}

/** Parses the address of a socket's peer. Returns `undefined` if the text is not an address. */
export function parseAddress(text: string): Address | undefined {
  return text.length > NODE_BYTES_MAX ? undefined : (parseV4(text) ?? parseV6(text));
}

function isPort(port: string): boolean {
  return /^_[A-Za-z0-9\-._~]+$/.test(port) || (/^[0-9]+$/.test(port) && Number(port) <= 65_535);
}

function parseV4(text: string): Address | undefined {
  if (!isIPv4(text)) return undefined;
  return { family: 4, bits: text.split(".").reduce((bits, octet) => (bits << 8n) | BigInt(octet), 0n) };
}

/** Parses an IPv6 address and ignores a zone after it. */
function parseV6(text: string): Address | undefined {
  const [address, zone] = text.split(/%(.*)/s) as [string, string | undefined];
  if (!isIPv6(address) || (zone !== undefined && !/^[A-Za-z0-9\-._~]+$/.test(zone))) return undefined;
  const v4 = /^(.*:)([0-9]+\.[0-9.]+)$/.exec(address);
  const groups = v4 ? v4[1]! + hexGroups(parseV4(v4[2]!)!.bits) : address;
  const [head, tail] = groups.split("::").map((part) => (part === "" ? [] : part.split(":"))) as [string[], string[]?];
  const zeros = tail ? Array<string>(8 - head.length - tail.length).fill("0") : [];
  const bits = [...head, ...zeros, ...(tail ?? [])].reduce((bits, group) => (bits << 16n) | BigInt(`0x${group}`), 0n);
  return canonical({ family: 6, bits });
}

function hexGroups(v4: bigint): string {
  return `${(v4 >> 16n).toString(16)}:${(v4 & 0xffffn).toString(16)}`;
}

/** Returns the IPv4 address of an IPv4-mapped address, or the address itself. */
function canonical(address: Address): Address {
  if (address.family === 4 || address.bits >> 32n !== 0xffffn) return address;
  return { family: 4, bits: address.bits & 0xffff_ffffn };
}

/** Returns the IPv4 address inside an IPv6 address (mapped, translated or 6to4), or the address itself. */
function embeddedV4(address: Address): Address {
  return embeddedV4Network({ ...address, prefix: address.family === 4 ? 32 : 128 });
}

/** Returns the IPv4 network inside an IPv6 network, or the network itself if there is none. */
function embeddedV4Network(network: Network): Network {
  if (network.family === 4) return network;
  for (const [embedding, before] of EMBEDDING) {
    const shift = BigInt(128 - before);
    if (network.prefix >= before && network.bits >> shift === embedding >> shift) {
      const bits = (network.bits >> BigInt(96 - before)) & 0xffff_ffffn;
      return { family: 4, bits, prefix: Math.min(32, network.prefix - before) };
    }
  }
  return network;
}

function contains(network: Network, address: Address): boolean {
  const shift = BigInt((network.family === 4 ? 32 : 128) - network.prefix);
  return network.family === address.family && network.bits >> shift === address.bits >> shift;
}

function parseNetwork(text: string): Network {
  const fail = (problem: string) =>
    new InvalidInputError(
      `trustedProxies: ${problem} (found ${quoted(text)}); networks and addresses have the form 10.0.0.0/8, ` +
        `203.0.113.7, 2001:db8::/32 or ::1`,
    );
  if (typeof text !== "string" || text.length > NETWORK_BYTES_MAX || text.includes("%")) throw fail("expected a network");
  const [host, bits] = text.split(/\/(.*)/s) as [string, string | undefined];
  const [v4, v6] = [parseV4(host), isIPv6(host) ? rawV6(host) : undefined];
  const address = v4 ?? v6;
  if (!address) throw fail(bits === undefined ? "expected a network" : "expected an address before the /");
  const bitsMax = address.family === 4 ? 32 : 128;
  const prefix = bits === undefined ? bitsMax : /^[0-9]+$/.test(bits) ? Number(bits) : Infinity;
  if (prefix > bitsMax) throw fail(`expected a prefix length from 0 to ${bitsMax} after the /`);
  const hostBits = BigInt(bitsMax - prefix);
  if ((address.bits >> hostBits) << hostBits !== address.bits) throw fail("the address has host bits set");
  return embeddedV4Network({ ...address, prefix });
}

/** Parses an IPv6 address without turning an IPv4-mapped one into IPv4, so that its prefix length keeps its meaning. */
function rawV6(text: string): Address | undefined {
  const address = parseV6(text);
  return address?.family === 4 ? { family: 6, bits: (0xffffn << 32n) | address.bits } : address;
}

/** Returns the index of the last comma between two elements of `Forwarded`. Quotes are paired from the right. */
function lastForwardedComma(line: string): number {
  let isQuoted = false;
  for (let at = line.length - 1; at >= 0; at--) {
    if (line[at] === "," && !isQuoted) return at;
    if (line[at] === '"' && (!isQuoted || line[at - 1] !== "\\")) isQuoted = !isQuoted;
  }
  return -1;
}

/** Returns the value of the only `for` parameter of an element of `Forwarded`, without quotes and escapes. */
function parseFor(element: string): string | undefined {
  let rest = element.replace(/^[ \t\n\f\r]+|[ \t\n\f\r]+$/g, "");
  let node: string | undefined;
  for (;;) {
    const pair = /^([!#$%&'*+\-.^_`|~0-9A-Za-z]+)=(?:"((?:[^"\\]|\\.)*)"|([^"; \t\\=]+)(?=[; \t]|$))[ \t\n\f\r]*/s.exec(rest);
    if (!pair) return undefined;
    if (pair[1]!.toLowerCase() === "for") {
      if (node !== undefined) return undefined;
      node = pair[3] ?? pair[2]!.replace(/\\(.)/gs, "$1");
    }
    rest = rest.slice(pair[0].length);
    if (rest === "") return node;
    if (rest[0] !== ";") return undefined;
    rest = rest.slice(1).replace(/^[ \t\n\f\r]+/, "");
  }
}

/** Returns an address as text; IPv6 as in RFC 5952. */
export function addressText(address: Address): string {
  const { family, bits } = address;
  if (family === 4) return [24n, 16n, 8n, 0n].map((shift) => (bits >> shift) & 0xffn).join(".");
  const groups = Array.from({ length: 8 }, (_, index) => Number((bits >> BigInt(112 - 16 * index)) & 0xffffn));
  let [start, length] = [-1, 1];
  for (let from = 0; from < 8; from++) {
    let end = from;
    while (end < 8 && groups[end] === 0) end++;
    if (end - from > length) [start, length] = [from, end - from];
  }
  const hex = (part: number[]) => part.map((group) => group.toString(16)).join(":");
  return start < 0 ? hex(groups) : `${hex(groups.slice(0, start))}::${hex(groups.slice(start + length))}`;
}

/** Returns the subject by which a client is counted: `ip:203.0.113.9`, or for IPv6 its /64, `ip:2001:db8::/64`. */
export function addressSubject(address: Address): string {
  const counted = embeddedV4(address);
  if (counted.family === 4) return `ip:${addressText(counted)}`;
  const hostBits = 128n - IPV6_PREFIX_BITS;
  return `ip:${addressText({ family: 6, bits: (counted.bits >> hostBits) << hostBits })}/${IPV6_PREFIX_BITS}`;
}
