// Prints, for every request that reaches the handler, the paths that Go programs commonly route by.
package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path"
	"strings"
)

func main() {
	mux := http.NewServeMux()
	for _, route := range os.Args[1:] {
		mux.HandleFunc(route, func(http.ResponseWriter, *http.Request) {})
	}
	handler := func(response http.ResponseWriter, request *http.Request) {
		paths := []string{request.URL.Path, path.Clean(request.URL.Path), strings.Split(request.RequestURI, "?")[0]}
		// Unless it redirects there, which is another request.
		if _, pattern := mux.Handler(request); pattern == request.URL.Path {
			paths = append(paths, pattern)
		}
		line, _ := json.Marshal(paths)
		fmt.Println(string(line))
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	panic(http.Serve(listener, http.HandlerFunc(handler)))
}
