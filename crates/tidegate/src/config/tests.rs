pub(crate) mod example;
mod findings;
mod mutated;
mod reload;
mod reports;
mod store;
mod values;

use super::{Code, Finding, Format, Loaded, Loader, Report};

/// Loads a TOML text, without environment variables and files.
fn load(text: &str) -> Result<Loaded, Report> {
    loader().load_text("tidegate.toml", text, Format::Toml)
}

fn load_yaml(text: &str) -> Result<Loaded, Report> {
    loader().load_text("tidegate.yaml", text, Format::Yaml)
}

fn loader() -> Loader {
    Loader::new().environment(|_| None).directory("/nonexistent")
}

/// Returns the findings about a text, whether or not it can be used.
fn findings(text: &str) -> Vec<Finding> {
    match load(text) {
        Ok(loaded) => loaded.findings,
        Err(report) => report.findings().to_vec(),
    }
}

fn codes(text: &str) -> Vec<Code> {
    findings(text).iter().map(Finding::code).collect()
}

/// Returns the part of the text that a finding underlines.
fn underlined<'t>(text: &'t str, finding: &Finding) -> &'t str {
    finding.span().map_or("", |span| &text[span.start..span.end])
}
