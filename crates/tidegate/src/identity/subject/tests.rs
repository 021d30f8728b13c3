use std::collections::HashMap;

use proptest::prelude::*;

use super::super::{AddressPrefixes, Anonymizer, Rotate};
use super::*;
use tidegate_core::Timestamp;

const USER: PartLabel<'static> = PartLabel { kind: "user", name: None };
const TENANT: PartLabel<'static> = PartLabel { kind: "header", name: Some("x-tenant") };

fn address() -> AddressKey {
    AddressPrefixes::default().key("203.0.113.9".parse().unwrap())
}

fn write(salt: Option<&Salt>, parts: &[(PartLabel<'_>, PartValue<'_>)]) -> String {
    let mut subject = SubjectKey::empty();
    let mut writer = SubjectWriter::new(&mut subject, salt);
    for (label, value) in parts {
        writer.part(*label, *value);
    }
    subject.to_string()
}

/// Every octet in every place, both kinds of networks, behind another part, and with pseudonyms.
#[test]
fn address_in_one_copy_equals_the_general_part() {
    let salt = Anonymizer::new(b"0123456789abcdef", Rotate::Never).unwrap().salt(Timestamp::ZERO);
    let v4 = (0..=255_u8).map(|octet| std::net::IpAddr::from([octet, 255 - octet, octet / 7, octet % 100]));
    let v6 = ["2001:db8::7", "::1", "::ffff:10.1.22.100"].map(|text| text.parse().unwrap());
    let prefixes =
        [AddressPrefixes::default(), AddressPrefixes::new(24, 48).unwrap(), AddressPrefixes::new(31, 128).unwrap()];
    for (address, prefixes) in v4.chain(v6).flat_map(|address| prefixes.map(|prefixes| (address, prefixes))) {
        let key = prefixes.key(address);
        for (before, salt) in [(None, None), (Some((USER, PartValue::Plain(b"42"))), None), (None, Some(&salt))] {
            let [mut short, mut general] = [SubjectKey::empty(), SubjectKey::empty()];
            let mut writers = [SubjectWriter::new(&mut short, salt), SubjectWriter::new(&mut general, salt)];
            if let Some((label, value)) = before {
                writers.iter_mut().for_each(|writer| writer.part(label, value));
            }
            let [short_writer, general_writer] = &mut writers;
            short_writer.address(key);
            general_writer.part(IP, PartValue::Address(key));
            assert_eq!(short, general);
            if salt.is_none() {
                assert!(short.to_string().ends_with(&format!("ip:{key}")), "{short}");
            }
        }
    }
}

#[test]
fn values_are_readable_and_escaped() {
    for (value, expected) in [
        (PartValue::Address(address()), "user:203.0.113.9"),
        (PartValue::Plain(b"42"), "user:42"),
        (PartValue::Plain(b""), "user:"),
        (PartValue::Plain(b"2001:db8::/64"), "user:2001:db8::/64"),
        (PartValue::Plain(b"a b"), "user:a%20b"),
        (PartValue::Plain(b"100%&#~!{}"), "user:100%25%26%23%7E%21%7B%7D"),
        (PartValue::Plain("ü\n\0".as_bytes()), "user:%C3%BC%0A%00"),
        (PartValue::Missing(address()), "user:!203.0.113.9"),
        (PartValue::Secret(b"s3cr3t"), "user:#4e738ca5563c06cfd0018299933d58db"),
        (PartValue::Public(b"/a?b"), "user:/a?b"),
    ] {
        assert_eq!(write(None, &[(USER, value)]), expected);
    }
    let odd_name = PartLabel { kind: "cookie", name: Some("a&b!") };
    assert_eq!(
        write(None, &[(odd_name, PartValue::Plain(b"x")), (USER, PartValue::Plain(b"y"))]),
        "cookie:a%26b%21:x&user:y"
    );
}

#[test]
fn long_value_is_written_as_its_digest() {
    let longest = "x".repeat(VALUE_BYTES_MAX);
    assert_eq!(write(None, &[(USER, PartValue::Plain(longest.as_bytes()))]), format!("user:{longest}"));
    let longer = "x".repeat(VALUE_BYTES_MAX + 1);
    for value in [PartValue::Plain(longer.as_bytes()), PartValue::Public(longer.as_bytes())] {
        let text = write(None, &[(USER, value)]);
        assert!(text.starts_with("user:#") && text.len() == "user:#".len() + 32, "{text}");
    }
}

#[test]
fn pseudonym_hides_the_value_and_differs_by_kind() {
    let salt = Anonymizer::new(b"0123456789abcdef", Rotate::Never).unwrap().salt(Timestamp::ZERO);
    let values = [
        PartValue::Address(address()),
        PartValue::Plain(b"203.0.113.9"),
        PartValue::Missing(address()),
        PartValue::Secret(b"203.0.113.9"),
    ];
    for value in values {
        let user = write(Some(&salt), &[(USER, value)]);
        let tenant = write(Some(&salt), &[(TENANT, value)]);
        assert!(!user.contains("203.0.113.9") && !tenant.contains("203.0.113.9"));
        assert_ne!(user.rsplit_once('~').unwrap().1, tenant.rsplit_once('~').unwrap().1);
    }
    assert!(write(Some(&salt), &[(USER, PartValue::Missing(address()))]).starts_with("user:!~"));
    assert_eq!(write(Some(&salt), &[(USER, PartValue::Public(b"/shorten"))]), "user:/shorten");
}

/// A random part: the index of its label, whether it is present, and its value.
type RandomPart = (u8, bool, Vec<u8>);

fn part() -> impl Strategy<Value = RandomPart> {
    let value = prop_oneof![
        prop::collection::vec(prop::sample::select(b"ab:&!#~%_{}=".to_vec()), 0..6),
        Just(b"203.0.113.9".to_vec()),
        Just(b"!203.0.113.9".to_vec()),
        Just(b"#4e738ca5563c06cfd0018299933d58db".to_vec()),
        Just(b"a&user:b".to_vec()),
        prop::collection::vec(any::<u8>(), 0..140),
    ];
    (0..3_u8, any::<bool>(), value)
}

fn written(parts: &[RandomPart]) -> String {
    let mut subject = SubjectKey::empty();
    let mut writer = SubjectWriter::new(&mut subject, None);
    for (label, is_present, value) in parts {
        let label = [USER, TENANT, PartLabel { kind: "header", name: Some("x-tenant&user") }][usize::from(*label)];
        if *is_present {
            writer.part(label, PartValue::Plain(value));
        } else {
            writer.part(label, PartValue::Missing(address()));
        }
    }
    subject.to_string()
}

/// The parts as far as they determine a subject: a missing part has no value.
type Meaning = Vec<(u8, Option<Vec<u8>>)>;

fn meaning(parts: &[RandomPart]) -> Meaning {
    parts.iter().map(|(label, is_present, value)| (*label, is_present.then(|| value.clone()))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn different_parts_are_different_subjects(all in prop::collection::vec(prop::collection::vec(part(), 1..4), 2..24)) {
        let mut seen: HashMap<String, Meaning> = HashMap::new();
        for parts in all {
            let subject = written(&parts);
            prop_assert!(subject.bytes().all(|byte| byte.is_ascii_graphic()));
            prop_assert_eq!(subject.matches('&').count(), parts.len() - 1);
            let meaning = meaning(&parts);
            let before = seen.entry(subject).or_insert_with(|| meaning.clone());
            prop_assert_eq!(&*before, &meaning);
        }
    }
}

#[test]
fn moving_a_byte_from_one_part_to_the_next_changes_the_subject() {
    let pairs: [(&[u8], &[u8]); 6] = [
        (b"a", b"b_c"),
        (b"a_b", b"c"),
        (b"a&header:x-tenant:b_c", b""),
        (b"", b"ab_c"),
        (b"a:b", b"c"),
        (b"a", b"b:c"),
    ];
    let mut subjects: Vec<String> = pairs
        .iter()
        .map(|(user, tenant)| write(None, &[(USER, PartValue::Plain(user)), (TENANT, PartValue::Plain(tenant))]))
        .collect();
    subjects.sort();
    subjects.dedup();
    assert_eq!(subjects.len(), pairs.len());
}
