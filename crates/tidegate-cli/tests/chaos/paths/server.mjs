// Prints, for every request that reaches the handler, the paths that Node programs commonly route by.
import http from 'node:http';
import path from 'node:path';

const print = (value) => process.stdout.write(JSON.stringify(value) + '\n');

const server = http.createServer((request, response) => {
  const paths = [];
  const add = (read) => {
    try { paths.push(read()); } catch { /* this program would have answered 400 */ }
  };
  const written = request.url.split('?')[0];
  add(() => written);
  add(() => decodeURIComponent(written));
  add(() => path.posix.normalize(decodeURIComponent(written)));
  add(() => new URL(request.url, 'http://host').pathname);
  add(() => decodeURIComponent(new URL(request.url, 'http://host').pathname));
  print(paths);
  response.end();
});
server.listen(0, '127.0.0.1', () => print(server.address().port));
