<?php

declare(strict_types=1);

// An API whose callers have plans. The rules are in tidegate.toml, the keys in keys.toml:
//
//     tidegate serve --config tidegate.toml
//     php -S 127.0.0.1:3003 index.php
//     curl -i -H 'x-api-key: demo-free-key' http://127.0.0.1:3003/v1/hello

require __DIR__ . '/../../clients/php/autoload.php'; // with Composer: vendor/autoload.php

// The default deadline of 50 ms suits a service on the same machine; this example also runs on busy ones.
$tidegate = new Tidegate\Client(getenv('TIDEGATE_URL') ?: 'http://127.0.0.1:8080', deadline: 1.0);

$path = (string) parse_url($_SERVER['REQUEST_URI'], PHP_URL_PATH);
$decision = $tidegate->checkRequest($_SERVER['REQUEST_METHOD'], $path, getallheaders(), $_SERVER['REMOTE_ADDR']);
foreach ($decision->headers() as $name => $value) {
    header("$name: $value");
}
if (!$decision->allowed) {
    http_response_code($decision->statusCode());
    echo $decision->body();
    return;
}

if ($path !== '/v1/hello') {
    http_response_code(404);
    return;
}
header('content-type: text/plain');
echo $decision->limits === [] ? "hello\n" : "hello, $decision->remaining of $decision->limit left\n";
