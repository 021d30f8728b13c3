//! The compose file, the Kubernetes manifest, the systemd unit, the image and the workflow: what they name exists, and
//! what they start becomes ready.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use tidegate_testkit::poll::eventually;
use tidegate_testkit::server::{Brand, Config, Reply, Server};

use super::{output_text, path, read, succeed, texts, tool, yaml};
use tidegate_testkit::http::{HttpClient, HttpResponse};
use tidegate_testkit::program::{Serving, command};

const COMPOSE: &str = "ops/docker/compose.yaml";
const COMPOSE_CONFIG: &str = "ops/docker/config/tidegate.toml";
const DOCKERFILE: &str = "ops/docker/Dockerfile";
const ENV_EXAMPLE: &str = "ops/docker/.env.example";
const READY: &str = "ops/docker/tidegate-ready";
const MANIFEST: &str = "ops/kubernetes/tidegate.yaml";
const UNIT: &str = "ops/systemd/tidegate.service";
const SOCKET_UNIT: &str = "ops/systemd/tidegate.socket";
const WORKFLOW: &str = ".github/workflows/test.yaml";
const PAGE: &str = "docs/operations.md";

/// The value of every secret in these tests.
const SECRET: &str = "planted0secret0of0the0tests";
/// The configuration file in all deployments.
const CONFIG_FILE: &str = "/etc/tidegate/tidegate.toml";
/// The largest exposure of the unit that is accepted, in tenths of what `systemd-analyze security` prints.
const EXPOSURE_MAX: &str = "20";

/// The options and the environment with which a deployment starts `tidegate serve`.
#[derive(Debug)]
struct Deployment {
    options: BTreeMap<String, String>,
    environment: BTreeMap<String, String>,
}

impl Deployment {
    /// Reads the words of a command line from `serve` on. Each option is `--NAME=VALUE` or `--NAME VALUE`.
    fn new<'w>(words: impl IntoIterator<Item = &'w str>, environment: BTreeMap<String, String>) -> Deployment {
        let mut words = words.into_iter();
        assert_eq!(words.next(), Some("serve"));
        let mut options = BTreeMap::new();
        while let Some(word) = words.next() {
            let (name, value) = word.split_once('=').unwrap_or_else(|| (word, words.next().expect("a value")));
            assert!(name.starts_with("--"), "{word}");
            assert!(options.insert(name.to_owned(), value.to_owned()).is_none(), "{name} is given twice");
        }
        Deployment { options, environment }
    }

    /// Returns the address of a listener.
    fn address(&self, listener: &str) -> (&str, u16) {
        let (host, port) = self.options[&format!("--{listener}")].rsplit_once(':').unwrap();
        (host, port.parse().unwrap())
    }

    /// Starts the service on free ports, with each of `replaced` replaced in options and environment.
    fn start(&self, replaced: &[(&str, &str)]) -> Serving {
        let replace = |text: &str| replaced.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to));
        let mut command = command();
        command.envs(self.environment.iter().map(|(name, value)| (name, replace(value))));
        let option = |(name, value): (&String, &String)| {
            if LISTENERS.contains(&name.trim_start_matches('-')) {
                format!("{name}={}:0", value.rsplit_once(':').unwrap().0)
            } else {
                format!("{name}={}", replace(value))
            }
        };
        let options: Vec<String> = self.options.iter().map(option).collect();
        Serving::start_as(command, &options.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

const LISTENERS: [&str; 3] = ["http", "resp", "admin"];

/// Replaces `${NAME:?message}` by the value of a variable of [`ENV_EXAMPLE`], and `$$` by `$`, as compose does.
fn interpolate(text: &str) -> String {
    let mut pieces = text.split("${");
    let mut interpolated = pieces.next().unwrap().to_owned();
    for piece in pieces {
        let (variable, rest) = piece.split_once('}').expect("a closing brace");
        let (name, message) = variable.split_once(":?").expect("a variable without a value is refused");
        assert!(!message.is_empty());
        assert!(env_example().contains(name), "{name} is not in {ENV_EXAMPLE}");
        interpolated = interpolated + SECRET + rest;
    }
    interpolated.replace("$$", "$")
}

/// Returns the names of the variables in [`ENV_EXAMPLE`]. Panics if one has a value, because secrets must not be
/// published.
fn env_example() -> BTreeSet<String> {
    let text = read(ENV_EXAMPLE);
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| line.strip_suffix('=').unwrap_or_else(|| panic!("{line}")).to_owned()).collect()
}

fn environment(variables: &Value) -> BTreeMap<String, String> {
    let variables = variables.as_object().unwrap().iter();
    variables.map(|(name, value)| (name.clone(), interpolate(value.as_str().unwrap()))).collect()
}

/// Returns the services of the compose file that run the image of [`DOCKERFILE`].
fn compose_services() -> Vec<Value> {
    let mut compose = yaml(COMPOSE).remove(0);
    let services = compose["services"].as_object_mut().unwrap();
    let instances: Vec<Value> =
        services.values_mut().filter(|service| service["image"] == "tidegate").map(Value::take).collect();
    assert_eq!(instances.len(), 2);
    instances
}

fn compose_deployment(service: &Value) -> Deployment {
    Deployment::new(texts(&service["command"]), environment(&service["environment"]))
}

/// Returns the object of this kind in the manifest.
fn manifest(kind: &str) -> Value {
    let objects: Vec<Value> = yaml(MANIFEST).into_iter().filter(|object| object["kind"] == kind).collect();
    assert_eq!(objects.len(), 1, "{kind}");
    objects.into_iter().next().unwrap()
}

fn container() -> Value {
    manifest("Deployment")["spec"]["template"]["spec"]["containers"][0].take()
}

fn kubernetes_deployment() -> Deployment {
    let container = container();
    let variables = container["env"].as_array().unwrap().iter();
    let variables = variables.map(|variable| {
        let key = variable["valueFrom"]["secretKeyRef"]["key"].as_str().expect("a secret");
        (variable["name"].as_str().unwrap().to_owned(), format!("secret:{key}"))
    });
    Deployment::new(texts(&container["args"]), variables.collect())
}

/// Returns the values of a setting of the unit, with continued lines joined.
fn unit_setting(name: &str) -> Vec<String> {
    let unit = read(UNIT).replace("\\\n", " ");
    let lines = unit.lines().filter_map(|line| line.split_once('=')).filter(|(setting, _)| *setting == name);
    lines.map(|(_, value)| value.to_owned()).collect()
}

fn unit_deployment() -> Deployment {
    let [start] = &unit_setting("ExecStart")[..] else { panic!("one ExecStart") };
    let mut words = start.split_whitespace();
    assert_eq!(words.next(), Some("/usr/local/bin/tidegate"));
    // The variable that is set in the file of EnvironmentFile=, by the comment above it.
    let variables = BTreeMap::from([("TIDEGATE_STORE".to_owned(), "secret:store".to_owned())]);
    assert!(read(UNIT).contains("# TIDEGATE_STORE="));
    Deployment::new(words, variables)
}

fn deployments() -> Vec<(&'static str, Deployment)> {
    let compose = compose_services();
    let compose = compose.iter().map(|service| (COMPOSE, compose_deployment(service)));
    compose.chain([(MANIFEST, kubernetes_deployment()), (UNIT, unit_deployment())]).collect()
}

/// Returns the words of `tidegate serve --help`, without brackets and punctuation.
fn help() -> BTreeSet<String> {
    let help = succeed(command().args(["serve", "--help"]));
    let words = help.split(|character: char| !character.is_ascii_alphanumeric() && !"-_$".contains(character));
    words.map(str::to_owned).collect()
}

/// Writes files for the secrets and returns their directory.
fn secret_files() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["admin-token", "http-token", "resp-password"] {
        std::fs::write(dir.path().join(name), format!("{SECRET}\n")).unwrap();
    }
    dir
}

fn redis_with_password() -> (Server, String) {
    let server = Config::new(Brand::Redis).set("requirepass", SECRET).start();
    let url = format!("redis://:{SECRET}@{}", server.addr());
    (server, url)
}

/// Returns whether the health check of the image reports that the instance is ready.
fn is_ready(serving: &Serving) -> bool {
    let (host, port) = serving.admin.rsplit_once(':').unwrap();
    Command::new("bash").arg(path(READY)).args([host, port]).output().unwrap().status.success()
}

fn wait_until_ready(serving: &Serving) {
    eventually("tidegate-ready succeeds", || is_ready(serving), |is_ready| *is_ready);
}

/// Posts a check with the token of the HTTP listener.
fn check(serving: &Serving, body: &str) -> HttpResponse {
    let header = [("authorization", &*format!("Bearer {SECRET}"))];
    HttpClient::open(&serving.http).ask("POST", "/v1/check", &header, body)
}

/// All listeners reject clients without the secret, and accept those with it.
fn assert_secrets_are_asked_for(serving: &Serving) {
    assert_eq!(serving.visit("/v1/rules").status, 401);
    let header = [("authorization", &*format!("Bearer {SECRET}"))];
    let rules = HttpClient::open(&serving.admin).ask("GET", "/v1/rules", &header, "");
    assert_eq!(rules.status, 200, "{rules:?}");
    let explicit = r#"{"key":"user:42","limit":"10/min"}"#;
    assert_eq!(serving.check(explicit).status, 401);
    assert_eq!(check(serving, explicit).status, 200);
    let mut connection = serving.connect();
    let refused = connection.call(&["TIDEGATE.CHECK", "user:42", "10/min"]).unwrap();
    assert!(matches!(&refused, Reply::Error(error) if error.starts_with("NOAUTH")), "{refused:?}");
    assert_eq!(connection.call(&["AUTH", SECRET]).unwrap().text(), "OK");
    assert_eq!(connection.call(&["TIDEGATE.CHECK", "user:42", "10/min"]).unwrap().items()[0].integer(), 1);
}

#[test]
fn every_option_and_variable_of_a_deployment_exists() {
    let help = help();
    for (file, deployment) in deployments() {
        for option in deployment.options.keys() {
            assert!(help.contains(option), "{file}: {option}");
        }
        for variable in deployment.environment.keys() {
            assert!(help.contains(&format!("${variable}")), "{file}: {variable}");
        }
        assert_eq!(deployment.options["--config"], CONFIG_FILE, "{file}");
        assert!(deployment.environment.contains_key("TIDEGATE_STORE"), "{file}: instances share a store");
    }
}

/// Every secret that `serve` can ask its clients for is set, by a file or a variable, wherever it listens on more than
/// loopback, and in the unit as well.
#[test]
fn every_secret_of_a_listener_is_set_in_a_deployment() {
    let help = help();
    let is_secret = |option: &&String| option.ends_with("-token-file") || option.ends_with("-password-file");
    let secrets: Vec<&String> = help.iter().filter(is_secret).collect();
    assert!(secrets.len() >= 3, "{secrets:?}");
    for (file, deployment) in deployments() {
        for option in &secrets {
            let name = option.trim_start_matches("--").trim_end_matches("-file").replace('-', "_").to_uppercase();
            let variable = format!("TIDEGATE_{name}");
            let is_set = deployment.options.contains_key(*option) || deployment.environment.contains_key(&variable);
            assert!(is_set, "{file} sets neither {option} nor {variable}");
        }
    }
}

#[test]
fn compose_publishes_the_ports_of_the_listeners_on_loopback_only() {
    let mut published = BTreeSet::new();
    for service in compose_services() {
        let deployment = compose_deployment(&service);
        let listening: BTreeSet<u16> = LISTENERS.map(|listener| deployment.address(listener).1).into();
        let mut reached = BTreeSet::new();
        for mapping in texts(&service["ports"]) {
            let [address, host, container] = mapping.split(':').collect::<Vec<_>>()[..] else { panic!("{mapping}") };
            assert_eq!(address, "127.0.0.1", "{mapping}");
            assert!(published.insert(host.to_owned()), "{host} is published twice");
            reached.insert(container.parse::<u16>().unwrap());
        }
        assert_eq!(reached, listening);
        assert_eq!(instruction("EXPOSE").last().unwrap(), "8080 6380 9180");
        assert_eq!(listening, [8080, 6380, 9180].into());
    }
    // The scrape configuration names the admin listeners as they are published.
    let scrape = yaml("ops/prometheus/prometheus.yaml").remove(0);
    let targets = texts(&scrape["scrape_configs"][0]["static_configs"][0]["targets"]).join(" ");
    assert_eq!(targets, "127.0.0.1:9180 127.0.0.1:9190");
    assert!(["9180", "9190"].iter().all(|port| published.contains(*port)), "{published:?}");
}

/// Both instances start with the command and environment of the compose file, on a Redis with a password, and share
/// their counters.
#[test]
fn the_instances_of_the_compose_file_become_ready_and_share_counters() {
    let (redis, url) = redis_with_password();
    let config = path(COMPOSE_CONFIG);
    let store = format!("redis://:{SECRET}@redis:6379");
    let instances: Vec<Serving> = compose_services()
        .iter()
        .map(|service| {
            let mounted = texts(&service["volumes"]);
            assert_eq!(mounted, ["./config:/etc/tidegate:ro"]);
            assert_eq!(texts(&service["healthcheck"]["test"]), ["CMD", "tidegate-ready"]);
            let deployment = compose_deployment(service);
            assert_eq!(deployment.environment["TIDEGATE_STORE"], store);
            deployment.start(&[(CONFIG_FILE, config.to_str().unwrap()), (&store, &url)])
        })
        .collect();
    instances.iter().for_each(wait_until_ready);
    instances.iter().for_each(assert_secrets_are_asked_for);
    let login = r#"{"request":{"method":"POST","path":"/login","peer":"203.0.113.9"}}"#;
    let statuses: Vec<u16> = (0..6).map(|turn| check(&instances[turn % 2], login).status).collect();
    assert_eq!(statuses, [200, 200, 200, 200, 200, 429]);

    redis.kill9();
    for instance in &instances {
        eventually("tidegate-ready fails without Redis", || is_ready(instance), |is_ready| !is_ready);
        let output = instance.output();
        assert!(!output.contains(SECRET), "{output}");
    }
}

/// A child process that is killed when it is dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The command and the health check of the service `redis`, with a Unix socket in place of the port.
#[test]
fn redis_of_the_compose_file_asks_for_the_password_and_evicts_nothing() {
    let service = yaml(COMPOSE).remove(0)["services"]["redis"].take();
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("redis.sock");
    let socket = socket.to_str().unwrap();
    let ["sh", "-c", script] = texts(&service["command"])[..] else { panic!("{service}") };
    let binary = tool("redis-server").get_program().to_str().unwrap().to_owned();
    let server = format!("{binary} --port 0 --unixsocket {socket} ");
    let script = interpolate(script).replace("redis-server ", &server);
    let mut started = Command::new("sh");
    started.args(["-c", &script]).envs(environment(&service["environment"])).current_dir(dir.path());
    let redis = Killed(started.stdout(Stdio::null()).spawn().unwrap());

    let ["CMD-SHELL", check] = texts(&service["healthcheck"]["test"])[..] else { panic!("{service}") };
    let check = interpolate(check).replace("redis-cli", &format!("redis-cli -s {socket}"));
    let is_healthy = |password: &str| {
        let mut shell = Command::new("sh");
        shell.args(["-c", &check]).env("REDIS_PASSWORD", password).output().unwrap().status.success()
    };
    eventually("the health check succeeds", || is_healthy(SECRET), |is_healthy| *is_healthy);
    assert!(!is_healthy("wrong"));
    let ask = |password: &str, words: &[&str]| {
        let mut client = Command::new("redis-cli");
        output_text(&client.env("REDISCLI_AUTH", password).args(["-s", socket]).args(words).output().unwrap())
    };
    assert!(ask("wrong", &["PING"]).contains("NOAUTH"));
    assert_eq!(ask(SECRET, &["CONFIG", "GET", "maxmemory-policy"]), "maxmemory-policy\nnoeviction\n");
    let running = format!("/proc/{}/cmdline", redis.0.id());
    assert!(!String::from_utf8_lossy(&std::fs::read(running).unwrap()).contains(SECRET));
}

#[test]
fn the_variables_of_the_compose_file_and_of_its_example_are_the_same() {
    let compose = read(COMPOSE);
    let used = compose.split("${").skip(1).map(|rest| rest.split(':').next().unwrap().to_owned());
    assert_eq!(used.collect::<BTreeSet<_>>(), env_example());
}

/// The container starts with the arguments, the ConfigMap and the secrets of the manifest, and its probes succeed, also
/// while Redis does not answer.
#[test]
fn the_container_of_the_manifest_becomes_ready_and_survives_without_redis() {
    let (redis, url) = redis_with_password();
    let (secrets, config) = (secret_files(), tempfile::tempdir().unwrap());
    let text = manifest("ConfigMap")["data"]["tidegate.toml"].take();
    let file = config.path().join("tidegate.toml");
    std::fs::write(&file, text.as_str().unwrap()).unwrap();
    let deployment = kubernetes_deployment();
    let mounted = "/run/secrets/tidegate";
    let replaced =
        [(CONFIG_FILE, file.to_str().unwrap()), (mounted, secrets.path().to_str().unwrap()), ("secret:store", &url)];
    let serving = deployment.start(&replaced);
    wait_until_ready(&serving);
    assert_secrets_are_asked_for(&serving);

    let container = container();
    let mounts = container["volumeMounts"].as_array().unwrap().iter().map(|mount| mount["mountPath"].as_str().unwrap());
    assert_eq!(mounts.collect::<Vec<_>>(), [Path::new(CONFIG_FILE).parent().unwrap().to_str().unwrap(), mounted]);
    redis.kill9();
    serving.until("/readyz", |answer| answer.status == 503);
    for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
        let get = &container[probe]["httpGet"];
        assert_eq!(get["port"], "admin", "{probe}");
        assert_eq!(serving.visit(get["path"].as_str().unwrap()).status, 200, "{probe}");
    }
    let scraped = manifest("Deployment")["spec"]["template"]["metadata"]["annotations"].take();
    assert_eq!(scraped["prometheus.io/port"], deployment.address("admin").1.to_string());
    assert_eq!(serving.visit(scraped["prometheus.io/path"].as_str().unwrap()).status, 200);
}

#[test]
fn the_objects_of_the_manifest_refer_to_each_other() {
    let (deployment, container) = (manifest("Deployment"), container());
    let labels = &deployment["spec"]["template"]["metadata"]["labels"];
    for selector in [
        &deployment["spec"]["selector"]["matchLabels"],
        &manifest("Service")["spec"]["selector"],
        &manifest("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        &manifest("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ] {
        assert_eq!(selector, labels);
    }
    let started = kubernetes_deployment();
    let ports = container["ports"].as_array().unwrap().iter();
    let ports: BTreeMap<&str, u64> =
        ports.map(|port| (port["name"].as_str().unwrap(), port["containerPort"].as_u64().unwrap())).collect();
    assert_eq!(ports, LISTENERS.map(|listener| (listener, u64::from(started.address(listener).1))).into());
    for port in manifest("Service")["spec"]["ports"].as_array().unwrap() {
        assert_eq!(ports[port["targetPort"].as_str().unwrap()], port["port"].as_u64().unwrap());
        assert_ne!(port["name"], "admin", "operators reach a pod, not the service");
    }
    for rule in manifest("NetworkPolicy")["spec"]["ingress"].as_array().unwrap() {
        let allowed = rule["ports"].as_array().unwrap();
        assert!(allowed.iter().all(|port| ports.contains_key(port["port"].as_str().unwrap())), "{rule}");
    }
    let config = manifest("ConfigMap")["data"]["tidegate.toml"].take();
    assert!(!config.as_str().unwrap().contains("instances"), "replicas are counted, so that they can be scaled");
    let drain: u64 = started.options["--drain"].trim_end_matches('s').parse().unwrap();
    let grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"].as_u64().unwrap();
    assert!(grace > drain + 10, "a shutdown takes up to {drain} + 10 s");
}

#[test]
fn the_secret_of_the_manifest_is_created_as_the_page_says() {
    let spec = manifest("Deployment")["spec"]["template"]["spec"].take();
    let volume = spec["volumes"].as_array().unwrap().iter().find(|volume| volume["name"] == "secrets").unwrap();
    let items = volume["secret"]["items"].as_array().unwrap().iter().map(|item| item["key"].as_str().unwrap());
    let reference = &spec["containers"][0]["env"][0]["valueFrom"]["secretKeyRef"];
    assert_eq!(volume["secret"]["secretName"], reference["name"]);
    let page = read(PAGE);
    let name = reference["name"].as_str().unwrap();
    assert!(page.contains(&format!("kubectl create secret generic {name} ")), "{PAGE}");
    for key in items.chain([reference["key"].as_str().unwrap()]) {
        assert!(page.contains(&format!("--from-literal={key}=")), "{PAGE}: {key}");
    }
}

#[test]
fn the_pods_of_the_manifest_have_no_privileges() {
    let pod = manifest("Deployment")["spec"]["template"]["spec"].take();
    let security = &pod["securityContext"];
    assert_eq!(security["runAsNonRoot"], true);
    assert_eq!(security["seccompProfile"]["type"], "RuntimeDefault");
    assert_eq!(instruction("USER").last().unwrap(), &format!("{0}:{0}", security["runAsUser"]));
    let container = &pod["containers"][0];
    assert_eq!(container["securityContext"]["allowPrivilegeEscalation"], false);
    assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true);
    assert_eq!(texts(&container["securityContext"]["capabilities"]["drop"]), ["ALL"]);
    for resource in ["cpu", "memory"] {
        assert!(container["resources"]["requests"][resource].is_string(), "{resource}");
    }
    assert!(container["resources"]["limits"]["memory"].is_string());
    assert_eq!(container["image"], format!("tidegate:{}", env!("CARGO_PKG_VERSION")));
}

/// `systemd-analyze` finds no error in the unit, and little that it may do.
#[test]
fn systemd_accepts_the_unit_and_finds_it_confined() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.service");
    let unit = read(UNIT).replace("/usr/local/bin/tidegate", env!("CARGO_BIN_EXE_tidegate"));
    std::fs::write(&file, unit).unwrap();
    let text = succeed(tool("systemd-analyze").args(["verify", "--man=no"]).arg(&file));
    assert_eq!(text, "");
    let threshold = format!("--threshold={EXPOSURE_MAX}");
    succeed(tool("systemd-analyze").args(["security", "--offline=true", "--no-pager", &threshold]).arg(&file));
}

/// The sockets of the socket unit are those of the service's listeners, so each of them uses one.
#[test]
fn systemd_accepts_the_socket_unit_and_its_addresses_are_those_of_the_listeners() {
    let dir = tempfile::tempdir().unwrap();
    let service = read(UNIT).replace("/usr/local/bin/tidegate", env!("CARGO_BIN_EXE_tidegate"));
    std::fs::write(dir.path().join("tidegate.service"), service).unwrap();
    let (file, unit) = (dir.path().join("tidegate.socket"), read(SOCKET_UNIT));
    std::fs::write(&file, &unit).unwrap();
    assert_eq!(succeed(tool("systemd-analyze").args(["verify", "--man=no"]).arg(&file)), "");
    let sockets: Vec<&str> = unit.lines().filter_map(|line| line.strip_prefix("ListenStream=")).collect();
    let deployment = unit_deployment();
    let listeners = ["http", "resp"].map(|listener| {
        let (host, port) = deployment.address(listener);
        format!("{host}:{port}")
    });
    assert_eq!(sockets, listeners);
}

/// The command line of the unit starts with the credentials that systemd would provide.
#[test]
fn the_command_of_the_unit_becomes_ready() {
    let (secrets, (_redis, url)) = (secret_files(), redis_with_password());
    let credentials: BTreeSet<String> =
        unit_setting("LoadCredential").iter().map(|value| value.split(':').next().unwrap().to_owned()).collect();
    assert_eq!(credentials, ["admin-token", "http-token", "resp-password"].map(str::to_owned).into());
    let deployment = unit_deployment();
    let files = deployment.options.values().filter_map(|value| value.strip_prefix("%d/"));
    assert_eq!(files.map(str::to_owned).collect::<BTreeSet<_>>(), credentials);
    for listener in LISTENERS {
        assert_eq!(deployment.address(listener).0, "127.0.0.1");
    }
    let config = path(COMPOSE_CONFIG);
    let replaced =
        [(CONFIG_FILE, config.to_str().unwrap()), ("%d", secrets.path().to_str().unwrap()), ("secret:store", &url)];
    let serving = deployment.start(&replaced);
    wait_until_ready(&serving);
    assert_secrets_are_asked_for(&serving);
}

/// Returns the arguments of each instruction of the Dockerfile with this name, with continued lines joined.
fn instruction(name: &str) -> Vec<String> {
    let dockerfile = read(DOCKERFILE).replace("\\\n", " ");
    let lines = dockerfile.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).map(str::trim);
    lines.map(str::to_owned).collect()
}

#[test]
fn the_image_is_built_with_the_right_toolchain_and_runs_without_root() {
    let toolchain = read("rust-toolchain.toml");
    let version = toolchain.split('"').nth(1).unwrap();
    let [build, run] = &instruction("FROM")[..] else { panic!("two stages") };
    assert_eq!(build, &format!("rust:{version}-slim-bookworm AS build"));
    assert_eq!(run, "debian:bookworm-slim", "the glibc of the build");
    assert_eq!(instruction("USER"), ["65532:65532"]);
    assert_eq!(instruction("ENTRYPOINT"), [r#"["tidegate"]"#]);
    assert!(instruction("HEALTHCHECK")[0].ends_with(r#"CMD ["tidegate-ready"]"#));
    let workflow = yaml(WORKFLOW).remove(0);
    assert_eq!(workflow["jobs"]["test"]["container"], format!("rust:{version}-bookworm"));
}

/// The build context has all members of the workspace, without which cargo does not build, and the file that is copied.
#[test]
fn the_build_context_of_the_image_is_complete() {
    let ignore = read(".dockerignore");
    let included: Vec<&str> = ignore.lines().filter_map(|line| line.strip_prefix('!')).collect();
    for file in &included {
        assert!(path(file).exists(), "{file}");
    }
    let metadata = succeed(
        Command::new(env!("CARGO"))
            .args(["metadata", "--format-version=1", "--no-deps", "--offline", "--locked"])
            .current_dir(path("")),
    );
    let metadata: Value = serde_json::from_str(&metadata).unwrap();
    let root = metadata["workspace_root"].as_str().unwrap();
    for package in metadata["packages"].as_array().unwrap() {
        let manifest = Path::new(package["manifest_path"].as_str().unwrap()).strip_prefix(root).unwrap().to_owned();
        assert!(included.iter().any(|included| manifest.starts_with(included)), "{}", manifest.display());
    }
    let copied = read(DOCKERFILE);
    for file in ["Cargo.toml", "Cargo.lock", READY] {
        assert!(included.contains(&file), "{file}");
    }
    assert!(copied.contains(READY));
}

#[test]
fn the_workflow_runs_make_test() {
    let workflow = yaml(WORKFLOW).remove(0);
    let steps = workflow["jobs"]["test"]["steps"].as_array().unwrap();
    let commands: Vec<&str> = steps.iter().filter_map(|step| step["run"].as_str()).collect();
    assert_eq!(commands, ["make test"]);
    assert!(read("Makefile").lines().any(|line| line.starts_with("test:")));
    assert_eq!(workflow["permissions"]["contents"], "read");
}

#[test]
fn the_page_about_operations_names_every_file() {
    let page = read(PAGE);
    let mut directories = vec![path("ops")];
    let root = path("").canonicalize().unwrap();
    let mut count = 0;
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap().path().canonicalize().unwrap();
            if entry.is_dir() {
                directories.push(entry);
                continue;
            }
            let name = entry.strip_prefix(&root).unwrap().to_str().unwrap();
            // A developer's own secrets, which are not in the repository.
            if name != "ops/docker/.env" {
                assert!(page.contains(&format!("(../{name})")), "{PAGE} does not link to {name}");
                count += 1;
            }
        }
    }
    assert!(count >= 10, "{count} files");
    assert!(page.contains(&format!("(../{WORKFLOW})")));
}
