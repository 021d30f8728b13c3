<?php

declare(strict_types=1);

namespace Tidegate;

use Tidegate\Exception\Invalid;

/**
 * Determines client addresses. Each proxy appends the address of its own peer to one header, so the entries on the right
 * were written by trusted proxies, and the walk begins there. The first entry that is not trusted is the client. An entry
 * that is not an address ends the walk: skipping it would expose a forged entry to its left.
 *
 * Addresses are packed as by inet_pton: 4 bytes for IPv4, 16 for IPv6.
 */
final class TrustedProxies
{
    private const ENTRIES_MAX = 100;
    private const HEADER_BYTES_MAX = 16 * 1024;
    private const NODE_BYTES_MAX = 128;

    /** The starts of IPv6 addresses that contain an IPv4 address: mapped, translated (RFC 6052) and 6to4 (RFC 3056). */
    private const EMBEDDINGS = ["\0\0\0\0\0\0\0\0\0\0\xff\xff", "\0\x64\xff\x9b\0\0\0\0\0\0\0\0", "\x20\x02"];

    /** @var list<array{string, int}> addresses and prefix lengths */
    private readonly array $networks;
    private readonly string $header;

    /**
     * @param list<string> $networks such as `10.0.0.0/8` or `::1`; none by default
     * @param string $header the one header in which the proxies report the client: X-Forwarded-For, Forwarded, or one
     *     that holds an address, such as CF-Connecting-IP
     * @throws Invalid if a network or the name of the header is not accepted
     */
    public function __construct(array $networks = [], string $header = 'X-Forwarded-For')
    {
        if (!self::isToken($header)) {
            throw new Invalid('expected the name of one header, found ' . Invalid::shown($header));
        }
        $this->networks = array_map(self::parseNetwork(...), array_values($networks));
        $this->header = strtolower($header);
    }

    /** Returns the name of the forwarding header, in lower case. */
    public function header(): string
    {
        return $this->header;
    }

    /**
     * Returns the client's address, packed.
     *
     * @param string $peer the address of the connection's peer
     * @param list<string> $lines the lines of the forwarding header
     * @throws Invalid if $peer is not an address
     */
    public function clientAddress(string $peer, array $lines): string
    {
        $hop = self::parse(explode('%', $peer, 2)[0]) ?? throw new Invalid('expected the address of the peer, found ' . Invalid::shown($peer));
        $hop = self::unmap($hop);
        $bytesLeft = self::HEADER_BYTES_MAX;
        $entriesLeft = self::ENTRIES_MAX;
        foreach (array_reverse($lines) as $line) {
            $isCut = strlen($line) > $bytesLeft;
            $rest = $isCut ? substr($line, strlen($line) - $bytesLeft) : $line;
            $bytesLeft -= strlen($rest);
            while ($rest !== null) {
                if (!$this->trusts($hop) || $entriesLeft-- === 0) {
                    return $hop;
                }
                $comma = $this->header === 'forwarded' ? self::lastForwardedComma($rest) : strrpos($rest, ',');
                $entry = $comma === false ? $rest : substr($rest, $comma + 1);
                $rest = $comma === false ? null : substr($rest, 0, $comma);
                $node = $this->header === 'forwarded' ? self::forwardedFor($entry) : $entry;
                $address = $node === null || ($isCut && $rest === null) ? null : self::parseNode($node);
                if ($address === null) {
                    return $hop;
                }
                $hop = $address;
            }
        }
        return $hop;
    }

    /** Returns the subject under which a client is counted: its IPv4 address, or the /64 of its IPv6 address. */
    public static function subject(string $address): string
    {
        $address = self::embeddedV4($address);
        if (strlen($address) === 4) {
            return 'ip:' . inet_ntop($address);
        }
        return 'ip:' . inet_ntop(substr($address, 0, 8) . str_repeat("\0", 8)) . '/64';
    }

    private function trusts(string $address): bool
    {
        foreach ([self::embeddedV4($address), self::unmap($address)] as $form) {
            foreach ($this->networks as [$network, $bits]) {
                if (strlen($network) === strlen($form) && self::masked($form, $bits) === $network) {
                    return true;
                }
            }
        }
        return false;
    }

    /** @return array{string, int} */
    private static function parseNetwork(string $text): array
    {
        [$addressText, $bitsText] = explode('/', $text, 2) + [1 => null];
        $address = self::parse($addressText);
        $max = 8 * strlen($address ?? '');
        $isNumber = $bitsText !== null && preg_match('/^\d{1,3}$/D', $bitsText) === 1;
        if ($address === null || ($bitsText !== null && (!$isNumber || (int) $bitsText > $max))) {
            throw new Invalid('expected a network or an address such as 10.0.0.0/8 or ::1, found ' . Invalid::shown($text));
        }
        $bits = $bitsText === null ? $max : (int) $bitsText;
        if (self::masked($address, $bits) !== $address) {
            throw new Invalid(sprintf('the network %s has host bits set; write %s/%d', Invalid::shown($text), (string) inet_ntop(self::masked($address, $bits)), $bits));
        }
        foreach (self::EMBEDDINGS as $start) {
            if ($max === 128 && $bits >= 8 * strlen($start) && str_starts_with($address, $start)) {
                return [substr($address, strlen($start), 4), min($bits - 8 * strlen($start), 32)];
            }
        }
        return [$address, $bits];
    }

    private static function masked(string $address, int $bits): string
    {
        $masked = '';
        for ($at = 0; $at < strlen($address); $at++) {
            $kept = max(0, min(8, $bits - 8 * $at));
            $masked .= chr(ord($address[$at]) & (0xff << (8 - $kept)) & 0xff);
        }
        return $masked;
    }

    /** Returns the IPv4 address that an IPv6 address contains, or the address itself. */
    private static function embeddedV4(string $address): string
    {
        foreach (self::EMBEDDINGS as $start) {
            if (strlen($address) === 16 && str_starts_with($address, $start)) {
                return substr($address, strlen($start), 4);
            }
        }
        return $address;
    }

    private static function unmap(string $address): string
    {
        return strlen($address) === 16 && str_starts_with($address, self::EMBEDDINGS[0]) ? substr($address, 12) : $address;
    }

    /** Parses an address; null for any other text. */
    private static function parse(string $text): ?string
    {
        return filter_var($text, FILTER_VALIDATE_IP) === false ? null : (inet_pton($text) ?: null);
    }

    /** Parses an entry of a forwarding header: an address, with or without port, brackets and zone. */
    private static function parseNode(string $entry): ?string
    {
        $text = trim($entry, " \t");
        if (strlen($entry) > self::NODE_BYTES_MAX) {
            return null;
        }
        $port = '(?::(?<port>\d+|_[A-Za-z0-9._~-]+))?';
        $zone = '(?:%[A-Za-z0-9._~-]+)?';
        $isNode = preg_match("/^\\[(?<v6>[^\\]%]*)$zone\\]$port$/D", $text, $match) === 1
            || preg_match("/^(?<v4>[^:\\[\\]]*)$port$/D", $text, $match) === 1
            || preg_match("/^(?<v6>[^\\[\\]%]*)$zone$/D", $text, $match) === 1;
        $isPort = ctype_digit($match['port'] ?? '') ? strlen($match['port']) < 20 && (int) $match['port'] <= 65535 : true;
        $isV6 = isset($match['v6']);
        $address = $isNode && $isPort ? self::parse($match[$isV6 ? 'v6' : 'v4']) : null;
        return $address !== null && strlen($address) === ($isV6 ? 16 : 4) ? self::unmap($address) : null;
    }

    /** Finds the last comma that is not quoted by the text to its right, which the trusted proxy wrote. */
    private static function lastForwardedComma(string $line): int|false
    {
        $isQuoted = false;
        for ($at = strlen($line) - 1; $at >= 0; $at--) {
            if ($line[$at] === ',' && !$isQuoted) {
                return $at;
            }
            if ($line[$at] === '"' && (!$isQuoted || $at === 0 || $line[$at - 1] !== '\\')) {
                $isQuoted = !$isQuoted;
            }
        }
        return false;
    }

    /** Returns the parameter `for` of an element of RFC 7239, which must be a list of pairs with exactly one `for`. */
    private static function forwardedFor(string $element): ?string
    {
        $rest = trim($element, " \t\n\f\r");
        $node = null;
        while (true) {
            $pattern = '/^(?<name>[A-Za-z0-9!#$%&\'*+.^_`|~-]+)=(?:"(?<quoted>(?:[^"\\\\]|\\\\.)*)"|(?<plain>[^; \t"\\\\=]+))(?=[; \t\n\f\r]|$)/Ds';
            if (preg_match($pattern, $rest, $match, PREG_UNMATCHED_AS_NULL) !== 1) {
                return null;
            }
            if (strtolower((string) $match['name']) === 'for') {
                if ($node !== null) {
                    return null;
                }
                $node = $match['plain'] ?? preg_replace('/\\\\(.)/s', '$1', (string) $match['quoted']);
            }
            $rest = ltrim(substr($rest, strlen((string) $match[0])), " \t\n\f\r");
            if ($rest === '') {
                return $node;
            }
            if ($rest[0] !== ';') {
                return null;
            }
            $rest = ltrim(substr($rest, 1), " \t\n\f\r");
        }
    }

    private static function isToken(string $text): bool
    {
        return preg_match('/^[A-Za-z0-9!#$%&\'*+.^_`|~-]+$/D', $text) === 1;
    }
}
