<?php
// Prints, for every request that reaches the handler, the paths that PHP programs commonly route by.
$written = explode('?', $_SERVER['REQUEST_URI'])[0];
$parsed = parse_url($_SERVER['REQUEST_URI'], PHP_URL_PATH);
$paths = [$written, rawurldecode($written), $_SERVER['SCRIPT_NAME'], $_SERVER['PHP_SELF'], $_SERVER['PATH_INFO'] ?? ''];
if (is_string($parsed)) {
    array_push($paths, $parsed, rawurldecode($parsed), urldecode($parsed));
}
file_put_contents('php://stdout', json_encode($paths, JSON_INVALID_UTF8_SUBSTITUTE) . "\n");
