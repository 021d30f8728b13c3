use super::*;

/// Entries as proxies write them, and the address that each contains (`None` if it is not an address).
const FORMS: [(&str, Option<&str>); 100] = [
    // IPv4
    ("203.0.113.9", Some("203.0.113.9")),
    ("0.0.0.0", Some("0.0.0.0")),
    ("255.255.255.255", Some("255.255.255.255")),
    (" 203.0.113.9", Some("203.0.113.9")),
    ("203.0.113.9 ", Some("203.0.113.9")),
    ("\t203.0.113.9\t", Some("203.0.113.9")),
    // IPv4 and a port
    ("203.0.113.9:0", Some("203.0.113.9")),
    ("203.0.113.9:80", Some("203.0.113.9")),
    ("203.0.113.9:65535", Some("203.0.113.9")),
    ("203.0.113.9:00080", Some("203.0.113.9")),
    ("203.0.113.9:_hidden", Some("203.0.113.9")),
    // IPv6
    ("::", Some("::")),
    ("::1", Some("::1")),
    ("2001:db8::9", Some("2001:db8::9")),
    ("2001:DB8::9", Some("2001:db8::9")),
    ("2001:0db8:0000:0000:0000:0000:0000:0009", Some("2001:db8::9")),
    ("2001:db8:1:2:3:4:5:6", Some("2001:db8:1:2:3:4:5:6")),
    ("2001:db8::1:8080", Some("2001:db8::1:8080")),
    ("1:2:3:4:5:6:7::", Some("1:2:3:4:5:6:7:0")),
    ("64:ff9b::203.0.113.9", Some("64:ff9b::cb00:7109")),
    // IPv6 in brackets
    ("[::1]", Some("::1")),
    ("[2001:db8::9]", Some("2001:db8::9")),
    (" [2001:db8::9] ", Some("2001:db8::9")),
    // IPv6 in brackets and a port
    ("[::1]:80", Some("::1")),
    ("[2001:db8::9]:65535", Some("2001:db8::9")),
    ("[2001:db8::9]:_x", Some("2001:db8::9")),
    // zones
    ("fe80::1%eth0", Some("fe80::1")),
    ("fe80::1%2", Some("fe80::1")),
    ("fe80::1%25eth0", Some("fe80::1")),
    ("fe80::1%br-lan.1", Some("fe80::1")),
    ("[fe80::1%eth0]", Some("fe80::1")),
    ("[fe80::1%eth0]:443", Some("fe80::1")),
    // IPv4-mapped, in every notation
    ("::ffff:203.0.113.9", Some("203.0.113.9")),
    ("::FFFF:203.0.113.9", Some("203.0.113.9")),
    ("::ffff:cb00:7109", Some("203.0.113.9")),
    ("0:0:0:0:0:ffff:cb00:7109", Some("203.0.113.9")),
    ("0000:0000:0000:0000:0000:ffff:cb00:7109", Some("203.0.113.9")),
    ("0:0::ffff:203.0.113.9", Some("203.0.113.9")),
    ("[::ffff:203.0.113.9]", Some("203.0.113.9")),
    ("[::ffff:cb00:7109]:80", Some("203.0.113.9")),
    ("::ffff:203.0.113.9%eth0", Some("203.0.113.9")),
    // similar to the mapped range, but outside it
    ("::203.0.113.9", Some("::cb00:7109")),
    ("::fffe:203.0.113.9", Some("::fffe:cb00:7109")),
    ("::ffff:0:203.0.113.9", Some("::ffff:0:cb00:7109")),
    ("1::ffff:203.0.113.9", Some("1::ffff:cb00:7109")),
    // obscured identifiers
    ("unknown", None),
    ("_hidden", None),
    ("_SEVKISEK", None),
    ("-", None),
    // nothing
    ("", None),
    (" ", None),
    (":", None),
    (":80", None),
    ("[]", None),
    ("[]:80", None),
    ("%eth0", None),
    // malformed IPv4
    ("203.0.113", None),
    ("203.0.113.", None),
    ("203.0.113.9.", None),
    ("203.0.113.9.1", None),
    ("203.0.113.256", None),
    ("203.0.113.09", None),
    ("0313.0.0161.011", None),
    ("0xcb007109", None),
    ("3405803785", None),
    ("203.0.113.9/32", None),
    ("203.0.113.9%eth0", None),
    ("203.0.113. 9", None),
    ("+203.0.113.9", None),
    ("２０３.0.113.9", None),
    ("203.0.113.9\u{a0}", None),
    ("203.0.113.9\0", None),
    // malformed ports
    ("203.0.113.9:", None),
    ("203.0.113.9:65536", None),
    ("203.0.113.9:-1", None),
    ("203.0.113.9:+80", None),
    ("203.0.113.9: 80", None),
    ("203.0.113.9:http", None),
    ("203.0.113.9:_", None),
    ("[2001:db8::9]:", None),
    ("[2001:db8::9]:65536", None),
    ("[2001:db8::9]80", None),
    // malformed brackets
    ("[203.0.113.9]", None),
    ("[203.0.113.9]:80", None),
    ("[2001:db8::9", None),
    ("2001:db8::9]", None),
    ("[[2001:db8::9]]", None),
    ("[2001:db8::9]]", None),
    ("(2001:db8::9)", None),
    ("\"2001:db8::9\"", None),
    // malformed IPv6
    (":::", None),
    ("2001:db8::9::", None),
    ("2001:db8:1:2:3:4:5:6:7", None),
    ("2001:db8::g", None),
    ("2001:db8::12345", None),
    ("fe80::1%", None),
    ("fe80::1%eth0%eth1", None),
    ("[fe80::1%]:80", None),
    // names, and addresses with a prefix
    ("localhost", None),
    ("for=203.0.113.9", None),
];

#[test]
fn every_known_form_is_parsed_and_everything_else_is_rejected() {
    for (text, expected) in FORMS {
        let expected: Option<IpAddr> = expected.map(|address| address.parse().unwrap());
        assert_eq!(parse_node(text.as_bytes()), expected, "{text:?}");
    }
    assert_eq!(parse_node(b"203.0.113.\xff9"), None);
    assert_eq!(parse_node(&[b'1'; NODE_BYTES_MAX + 1]), None);
}

#[test]
fn the_key_of_an_address_is_its_network() {
    for (v4, v6, address, key) in [
        (32, 64, "203.0.113.9", "203.0.113.9"),
        (24, 64, "203.0.113.9", "203.0.113.0/24"),
        (1, 64, "203.0.113.9", "128.0.0.0/1"),
        (32, 64, "2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        (32, 56, "2001:db8:1:2ff:3:4:5:6", "2001:db8:1:200::/56"),
        (32, 1, "2001:db8::", "::/1"),
        (32, 128, "2001:db8::9", "2001:db8::9"),
        (32, 64, "::1", "::/64"),
        (32, 64, "fe80::1", "fe80::/64"),
    ] {
        let prefixes = AddressPrefixes::new(v4, v6).unwrap();
        assert_eq!(prefixes.key(address.parse().unwrap()).to_string(), key);
    }
}

#[test]
fn ipv4_clients_on_an_ipv6_socket_keep_their_own_keys() {
    let prefixes = AddressPrefixes::new(32, 56).unwrap();
    let key = |text: &str| prefixes.key(text.parse().unwrap());
    assert_eq!(key("::ffff:203.0.113.9"), key("203.0.113.9"));
    assert_ne!(key("::ffff:203.0.113.9"), key("::ffff:203.0.113.10"));
    assert_eq!(key("64:ff9b:1::1"), key("64:ff9b:1::2"));
}

#[test]
fn ipv6_address_that_contains_an_ipv4_address_is_counted_as_ipv4() {
    let prefixes = AddressPrefixes::new(24, 56).unwrap();
    let key = |text: &str| prefixes.key(text.parse().unwrap()).to_string();
    for text in
        ["::ffff:203.0.113.9", "64:ff9b::203.0.113.9", "64:ff9b::cb00:7109", "2002:cb00:7109::", "2002:cb00:7109:1::9"]
    {
        assert_eq!(key(text), "203.0.113.0/24", "{text}");
    }
    for text in ["64:ff9b:0:0:0:1:cb00:7109", "2003:cb00:7109::", "2001:cb00:7109::", "::203.0.113.9"] {
        assert!(key(text).ends_with("/56"), "{text}");
    }
}

#[test]
fn prefix_length_out_of_range_is_refused() {
    for (v4, v6, expected) in [
        (0, 64, "an IPv4 prefix must have 1 to 32 bits, not 0"),
        (33, 64, "an IPv4 prefix must have 1 to 32 bits, not 33"),
        (32, 0, "an IPv6 prefix must have 1 to 128 bits, not 0"),
        (32, 129, "an IPv6 prefix must have 1 to 128 bits, not 129"),
    ] {
        assert_eq!(AddressPrefixes::new(v4, v6).unwrap_err().to_string(), expected);
    }
}
