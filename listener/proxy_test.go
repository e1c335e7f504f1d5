package listener_test

import (
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
)

// proxy passes TCP on to a server, until it is told to swallow.
type proxy struct {
	listener net.Listener
	target   string
	links    chan *link // each new connection
	wg       sync.WaitGroup
}

// link is a connection through a proxy.
type link struct {
	swallow atomic.Bool
	closed  chan struct{} // by the client
}

func newProxy(t *testing.T, target string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: l, target: target, links: make(chan *link, 100)}
	p.wg.Go(p.accept)
	t.Cleanup(func() {
		_ = l.Close()
		p.wg.Wait()
	})
	return p
}

func (p *proxy) address() string { return p.listener.Addr().String() }

func (p *proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", p.target)
		if err != nil {
			_ = client.Close()
			continue
		}
		l := &link{closed: make(chan struct{})}
		p.links <- l
		p.wg.Go(func() {
			l.copy(server, client)
			close(l.closed)
			_ = server.Close()
		})
		p.wg.Go(func() {
			l.copy(client, server)
			if !l.swallow.Load() {
				_ = client.Close()
			}
		})
	}
}

// copy reads from src to its end, whether or not it passes on what it reads.
func (l *link) copy(dst io.Writer, src io.Reader) {
	buf := make([]byte, 4096)
	for {
		n, err := src.Read(buf)
		if err != nil {
			return
		}
		if l.swallow.Load() {
			continue
		}
		if _, err := dst.Write(buf[:n]); err != nil {
			return
		}
	}
}
