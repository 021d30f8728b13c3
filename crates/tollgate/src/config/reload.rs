//! Whether a configuration may take the place of the one in force.
//!
//! **Problem.** A file that is read while it is being written, or that was cut off by a full disk or a killed deploy, is
//! usually still a valid one: it says less. Rules that vanish switch limits off, and nothing else looks wrong.
//!
//! **Idea.** At a reload there is something to compare with. The reload fails, and what is in force stays, if
//!
//! 1. the file is empty and the one in force was not;
//! 2. there are no rules (no keys) any more and the file does not say `rules = []` (`keys = []`);
//! 3. the file expects no number of rules (keys) any more, and the one in force did;
//! 4. the one in force has `expect`, and the file (the keys file) is merely the beginning of it; or
//! 5. a secret that is read from a file is merely the beginning of the one in force.
//!
//! Everything else that is gone is named in a warning. Rule 3 is what makes `expect` hold wherever it stands: a file that
//! is cut off before it has none, and one that is cut off behind it has fewer rules than it says. Rule 4 closes the gap
//! in which the cut is inside the last rule, behind the fields that a rule needs.

use super::changes::{Changes, PartKind};
use super::finding::{Code, Finding, Report};
use super::forms::Secret;
use super::load::Loaded;
use super::types::Expect;

/// A warning names so many parts, and then how many more there are.
const NAMES_MAX: usize = 10;

impl Loaded {
    /// Checks that this configuration may take the place of the one in force. Notes what it changes, and warns of what it
    /// removes.
    pub(crate) fn replacing(mut self, running: &Loaded) -> Result<Loaded, Report> {
        self.changes = Changes::between(running, &self);
        let errors = errors(&self, running);
        let is_refused = !errors.is_empty();
        let findings = if is_refused { errors } else { warnings(&self, running) };
        let findings = findings.into_iter().map(|finding| finding.of(&self.source));
        self.findings.splice(0..0, findings);
        match is_refused {
            true => Err(Report::new(self.source.name(), self.findings)),
            false => Ok(self),
        }
    }
}

fn errors(loaded: &Loaded, running: &Loaded) -> Vec<Finding> {
    let (config, before) = (&loaded.config, &running.config);
    let is_blank = |loaded: &Loaded| loaded.text.reveal().trim().is_empty();
    if is_blank(loaded) && !is_blank(running) {
        let help = "to limit nothing, write `rules = []`";
        return vec![Finding::new(Code::FileCutOff, "the file is empty, and the one in force is not").help(help)];
    }
    let mut findings = Vec::new();
    if config.rules.is_absent() && !before.rules.is_empty() {
        let message =
            format!("there is no rule; the configuration in force has {}", counted(before.rules.len(), "rule"));
        let help = "if nothing is to be limited, say so with `rules = []`";
        findings.push(Finding::new(Code::RulesGone, message).help(help));
    }
    let keys_before = before.keys.len() + running.keys_file.keys.len();
    if config.keys.is_absent() && config.keys_file.is_none() && keys_before > 0 {
        let message = format!("there is no key; the configuration in force has {}", counted(keys_before, "key"));
        let help = "if no key is to be known, say so with `keys = []`";
        findings.push(Finding::new(Code::KeysGone, message).help(help));
    }
    let expected = |config: &super::Config| config.expect.as_deref().cloned().unwrap_or_default();
    let (expect, expect_before): (Expect, Expect) = (expected(config), expected(before));
    for (field, is_gone) in [
        ("rules", expect.rules.is_none() && expect_before.rules.is_some()),
        ("keys", expect.keys.is_none() && expect_before.keys.is_some()),
    ] {
        if is_gone {
            let message = format!("the file in force has `expect.{field}`, and this one has not");
            let help = "an expectation is removed by a restart; a reload keeps it, because a file that is cut off \
                        may have lost it";
            findings.push(Finding::new(Code::ExpectationGone, message).help(help));
        }
    }
    if before.expect.is_some() && !loaded.changes.is_empty() {
        let keys = (&loaded.keys_file.text, &running.keys_file.text);
        for (file, (text, of)) in [("the file", (&loaded.text, &running.text)), ("the keys file", keys)] {
            if is_beginning(text, of) {
                let message = format!("{file} is only the beginning of the one in force: the rest is missing");
                let help = "if the rest was removed on purpose, put a comment at the end of the file";
                findings.push(Finding::new(Code::FileCutOff, message).help(help));
            }
        }
    }
    // Half a secret is another secret: pseudonyms would change, and every counter would begin anew.
    for (name, secret) in &loaded.secret_files {
        let before = running.secret_files.iter().find(|(other, _)| other == name);
        if before.is_some_and(|(_, before)| is_beginning(secret, before)) {
            let message = format!("the secret in {name} is only the beginning of the one in force");
            findings.push(Finding::new(Code::FileCutOff, message).help("write the file again, whole"));
        }
    }
    findings
}

fn warnings(loaded: &Loaded, running: &Loaded) -> Vec<Finding> {
    let mut findings = Vec::new();
    for kind in PartKind::ALL {
        let count = loaded.changes.removed_of(kind).count();
        if count == 0 {
            continue;
        }
        let names: Vec<&str> = loaded.changes.removed_of(kind).take(NAMES_MAX).collect();
        let more = match count - names.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let message = format!("{} removed: {}{more}", counted(count, kind.name()), names.join(", "));
        findings.push(Finding::new(Code::Removed, message).help("check that the file is whole"));
    }
    let ends = |text: &str| text.is_empty() || text.ends_with('\n');
    let lost_end = |before: &Secret, now: &Secret| ends(before.reveal()) && !ends(now.reveal());
    let is_lost = lost_end(&running.text, &loaded.text) || lost_end(&running.keys_file.text, &loaded.keys_file.text);
    if is_lost && !loaded.changes.is_empty() {
        let message = "the file does not end with a line end any more: its last line may be cut off";
        findings.push(Finding::new(Code::LineEndGone, message).help("end the last line with a line end"));
    }
    findings
}

fn is_beginning(text: &Secret, of: &Secret) -> bool {
    let (text, of) = (text.reveal(), of.reveal());
    !text.is_empty() && text.len() < of.len() && of.starts_with(text)
}

/// `1 rule`, `2 rules`.
fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}
