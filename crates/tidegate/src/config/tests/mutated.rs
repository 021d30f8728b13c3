//! Files with random damage are loaded or rejected, and every report can be printed.

use std::sync::LazyLock;

use miette::NarratableReportHandler;
use proptest::prelude::*;
use proptest::sample::select;

use super::example::complete_example;
use super::loader;
use crate::config::{Code, Finding, Format};

static TOML: LazyLock<String> = LazyLock::new(complete_example);
const YAML: &str = "
store: redis://h
trusted_proxies: [10.0.0.0/8, '::1']
jwt:
  algorithm: HS256
  key: |
    ein langer Schlüssel
    in mehreren Zeilen
plans:
  default:
    limits:
      - 60/min
      - { name: daily, quota: 1000, window: 1day }
rules:
  - &first
    name: login
    match: { methods: [POST], path: /login, headers: { x-tenant: true } }
    limits: plan
  - <<: *first
    name: zweite Rëgel
";

#[test]
fn undamaged_files_have_no_syntax_errors() {
    for (text, format) in [(&**TOML, Format::Toml), (YAML, Format::Yaml)] {
        let Err(report) = loader().load_text("whole", text, format) else { continue };
        assert!(!report.findings().iter().any(|finding| finding.code() == Code::Syntax), "{report:?}");
    }
}

#[derive(Clone, Debug)]
enum Damage {
    Delete { at: usize, bytes: usize },
    Insert { at: usize, text: &'static str },
    Repeat { at: usize, bytes: usize },
}

fn damage() -> impl Strategy<Value = Damage> {
    let texts = vec![
        "\"", "'", "\n", "é", "[", "]", "{", "}", "=", ":", "0", "-1", "#", " ", "\t", "*", "&", "\u{0}", "|\n", "🦀",
        "[[",
    ];
    prop_oneof![
        (any::<usize>(), 1..40_usize).prop_map(|(at, bytes)| Damage::Delete { at, bytes }),
        (any::<usize>(), select(texts)).prop_map(|(at, text)| Damage::Insert { at, text }),
        (any::<usize>(), 1..60_usize).prop_map(|(at, bytes)| Damage::Repeat { at, bytes }),
    ]
}

fn damaged(text: &str, damage: &Damage) -> String {
    let place = |at: usize| text.floor_char_boundary(at % (text.len() + 1));
    match damage {
        Damage::Delete { at, bytes } => {
            let from = place(*at);
            let to = text.ceil_char_boundary(from + bytes).min(text.len());
            format!("{}{}", &text[..from], &text[to..])
        }
        Damage::Insert { at, text: inserted } => format!("{}{inserted}{}", &text[..place(*at)], &text[place(*at)..]),
        Damage::Repeat { at, bytes } => {
            let from = place(*at);
            let to = text.ceil_char_boundary(from + bytes).min(text.len());
            format!("{}{}", &text[..to], &text[from..])
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_500, ..ProptestConfig::default() })]

    #[test]
    fn damage_is_reported_and_the_report_can_be_printed(
        is_toml in any::<bool>(),
        damages in prop::collection::vec(damage(), 1..5),
    ) {
        let (text, format) = if is_toml { (&**TOML, Format::Toml) } else { (YAML, Format::Yaml) };
        let text = damages.iter().fold(text.to_owned(), |text, damage| damaged(&text, damage));
        let findings: Vec<Finding> = match loader().load_text("damaged", &text, format) {
            Ok(loaded) => loaded.findings,
            Err(report) => {
                prop_assert!(report.errors() > 0);
                report.findings().to_vec()
            }
        };
        for finding in &findings {
            let mut drawn = String::new();
            NarratableReportHandler::new().render_report(&mut drawn, finding).unwrap();
            prop_assert!(drawn.contains(finding.code().as_str()));
            let debug = format!("{finding:?}");
            prop_assert!(debug.starts_with(finding.code().as_str()));
        }
    }
}
