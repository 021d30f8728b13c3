package tidegate

import (
	"net/netip"
	"strings"
)

const (
	// entriesMax and headerBytesMax bound how much of the forwarding header is read, from the right.
	entriesMax     = 100
	headerBytesMax = 16 * 1024
	nodeBytesMax   = 128
)

// trustedProxies determines client addresses. Each proxy appends the address of its own peer to one header, so the
// entries on the right were written by trusted proxies, and the walk begins there. The first entry that is not trusted
// is the client. An entry that is not an address ends the walk: skipping it would expose a forged entry to its left.
type trustedProxies struct {
	networks []netip.Prefix
	header   string // canonical name
}

func parseNetworks(texts []string) ([]netip.Prefix, error) {
	var networks []netip.Prefix
	for _, text := range texts {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			address, addressErr := netip.ParseAddr(text)
			if addressErr != nil || address.Zone() != "" {
				return nil, invalid("expected a network or an address such as 10.0.0.0/8 or ::1, found %s", shown(text))
			}
			prefix = netip.PrefixFrom(address, address.BitLen())
		}
		if prefix.Masked() != prefix {
			return nil, invalid("the network %s has host bits set; write %s", shown(text), prefix.Masked())
		}
		networks = append(networks, embeddedNetwork(prefix))
	}
	return networks, nil
}

// trusts reports whether the address, or the IPv4 address that it contains, is in one of the networks.
func (p trustedProxies) trusts(address netip.Addr) bool {
	for _, network := range p.networks {
		if network.Contains(embeddedV4(address)) || network.Contains(address.Unmap()) {
			return true
		}
	}
	return false
}

// clientAddress returns the client's address, given the peer and the lines of the forwarding header.
func (p trustedProxies) clientAddress(peer netip.Addr, lines []string) netip.Addr {
	hop := peer.WithZone("").Unmap()
	bytesLeft, entriesLeft := headerBytesMax, entriesMax
	for i := len(lines) - 1; i >= 0 && p.trusts(hop); i-- {
		line := lines[i]
		isCut := len(line) > bytesLeft
		if isCut {
			line = line[len(line)-bytesLeft:]
		}
		bytesLeft -= len(line)
		for hasMore := true; hasMore && p.trusts(hop); entriesLeft-- {
			var entry string
			entry, line, hasMore = p.lastEntry(line)
			if entriesLeft == 0 || isCut && !hasMore {
				return hop
			}
			address, ok := p.parseEntry(entry)
			if !ok {
				return hop
			}
			hop = address
		}
	}
	return hop
}

// lastEntry splits the rightmost entry off a line. hasMore reports whether there are entries before it.
func (p trustedProxies) lastEntry(line string) (entry, before string, hasMore bool) {
	comma := strings.LastIndexByte(line, ',')
	if p.header == "Forwarded" {
		comma = lastForwardedComma(line)
	}
	if comma < 0 {
		return line, "", false
	}
	return line[comma+1:], line[:comma], true
}

func (p trustedProxies) parseEntry(entry string) (netip.Addr, bool) {
	if p.header == "Forwarded" {
		node, ok := forwardedFor(entry)
		if !ok {
			return netip.Addr{}, false
		}
		entry = node
	}
	return parseNode(entry)
}

// parseNode parses an entry of a forwarding header: an address, with or without port, brackets and zone.
func parseNode(entry string) (netip.Addr, bool) {
	if len(entry) > nodeBytesMax {
		return netip.Addr{}, false
	}
	text := strings.Trim(entry, " \t")
	if inside, isBracketed := strings.CutPrefix(text, "["); isBracketed {
		address, after, isClosed := strings.Cut(inside, "]")
		if port, hasPort := strings.CutPrefix(after, ":"); !isClosed || after != "" && !(hasPort && isPort(port)) {
			return netip.Addr{}, false
		}
		return parseV6(address)
	}
	switch strings.Count(text, ":") {
	case 0:
		address, err := netip.ParseAddr(text)
		return address, err == nil && address.Is4()
	case 1:
		host, port, _ := strings.Cut(text, ":")
		address, err := netip.ParseAddr(host)
		return address, err == nil && address.Is4() && isPort(port)
	}
	return parseV6(text)
}

// parseV6 parses an IPv6 address and ignores its zone, which names an interface of the proxy.
func parseV6(text string) (netip.Addr, bool) {
	text, zone, hasZone := strings.Cut(text, "%")
	address, err := netip.ParseAddr(text)
	return address.Unmap(), err == nil && address.Is6() && (!hasZone || isZone(zone))
}

func isZone(zone string) bool {
	return zone != "" && !strings.ContainsFunc(zone, func(r rune) bool { return !isAlphanumeric(r) && !strings.ContainsRune("-._~", r) })
}

// isPort reports whether this is a port, or an obfuscated one of RFC 7239 (_gazonk).
func isPort(port string) bool {
	if hidden, isHidden := strings.CutPrefix(port, "_"); isHidden {
		return isZone(hidden)
	}
	return digits(port, 65535) >= 0
}

func isAlphanumeric(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
}

// The IPv6 networks whose addresses contain an IPv4 address, and the number of bits before it.
var embeddings = []netip.Prefix{
	netip.MustParsePrefix("::ffff:0:0/96"), // IPv4-mapped
	netip.MustParsePrefix("64:ff9b::/96"),  // translated, RFC 6052
	netip.MustParsePrefix("2002::/16"),     // 6to4, RFC 3056
}

// embeddedNetwork returns the IPv4 network that an IPv6 network contains, or the network itself.
func embeddedNetwork(network netip.Prefix) netip.Prefix {
	if network.Addr().Is4() {
		return network
	}
	bytes := network.Addr().As16()
	for _, embedding := range embeddings {
		// Prefix.Contains does not match mapped addresses, so the bytes are compared.
		if first := embedding.Addr().As16(); network.Bits() >= embedding.Bits() && string(first[:embedding.Bits()/8]) == string(bytes[:embedding.Bits()/8]) {
			at := embedding.Bits() / 8
			v4 := netip.AddrFrom4([4]byte(bytes[at : at+4]))
			return netip.PrefixFrom(v4, min(network.Bits()-embedding.Bits(), 32)).Masked()
		}
	}
	return network
}

// embeddedV4 returns the IPv4 address that an IPv6 address contains, or the address itself.
func embeddedV4(address netip.Addr) netip.Addr {
	return embeddedNetwork(netip.PrefixFrom(address.WithZone(""), address.BitLen())).Addr()
}

// addressSubject returns the subject under which a client is counted: an IPv4 address, or the /64 of an IPv6 address,
// because a host may use any address in it.
func addressSubject(address netip.Addr) string {
	if address = embeddedV4(address); address.Is4() {
		return "ip:" + address.String()
	}
	return "ip:" + netip.PrefixFrom(address, 64).Masked().String()
}

// lastForwardedComma returns the index of the last comma that separates two elements of a Forwarded header, or -1.
// Whether a comma is quoted depends only on the text to its right, which the trusted proxy wrote.
func lastForwardedComma(line string) int {
	isQuoted := false
	for at := len(line) - 1; at >= 0; at-- {
		switch {
		case line[at] == ',' && !isQuoted:
			return at
		case line[at] == '"' && (!isQuoted || !strings.HasSuffix(line[:at], `\`)):
			isQuoted = !isQuoted
		}
	}
	return -1
}

// forwardedFor returns the value of the parameter `for` of an element of RFC 7239. The element must be a list of
// name=value pairs with exactly one `for`.
func forwardedFor(element string) (node string, ok bool) {
	rest := strings.Trim(element, asciiWhitespace)
	found := false
	for {
		name, after, hasValue := strings.Cut(rest, "=")
		if !hasValue || !isToken(name) {
			return "", false
		}
		value, after, ok := splitValue(after)
		if !ok {
			return "", false
		}
		if strings.EqualFold(name, "for") {
			if found {
				return "", false
			}
			node, found = value, true
		}
		after = strings.TrimLeft(after, asciiWhitespace)
		if after == "" {
			return node, found
		}
		if after[0] != ';' {
			return "", false
		}
		rest = strings.TrimLeft(after[1:], asciiWhitespace)
	}
}

// splitValue splits a token or a quoted string from the start of a string.
func splitValue(text string) (value, after string, ok bool) {
	quoted, isQuoted := strings.CutPrefix(text, `"`)
	if !isQuoted {
		end := strings.IndexAny(text, "; \t")
		if end < 0 {
			end = len(text)
		}
		value = text[:end]
		return value, text[end:], value != "" && !strings.ContainsAny(value, "\"\\=")
	}
	var unquoted strings.Builder
	for at := 0; at < len(quoted); at++ {
		switch quoted[at] {
		case '"':
			return unquoted.String(), quoted[at+1:], true
		case '\\':
			if at++; at == len(quoted) {
				return "", "", false
			}
		}
		unquoted.WriteByte(quoted[at])
	}
	return "", "", false
}

func isToken(name string) bool {
	return name != "" && !strings.ContainsFunc(name, func(r rune) bool { return !isAlphanumeric(r) && !strings.ContainsRune("!#$%&'*+-.^_`|~", r) })
}
