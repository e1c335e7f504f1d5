package listener_test

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
)

// fakeServer speaks as much of Postgres as a notifier hears, over pipes in
// memory, so that its time is that of a synctest bubble. What it does wrong
// can be changed at any time.
type fakeServer struct {
	// onListen, if set, is called after a LISTEN was carried out.
	onListen func(channel string)

	mu      sync.Mutex
	conns   map[*fakeConn]bool
	dials   int
	refused int  // LISTENs that were refused
	down    bool // refuses connections
	refuse  bool // refuses LISTEN, like a standby
	hang    bool // swallows LISTEN
	dead    bool // swallows everything after the login
	pooled  bool // accepts LISTEN on some other connection
}

type fakeConn struct {
	server *fakeServer
	net    net.Conn

	mu        sync.Mutex // of the following, and of writing
	listening map[string]bool
	frozen    bool
}

func (s *fakeServer) set(change func(*fakeServer)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s)
}

// connect is a Config.Connect.
func (s *fakeServer) connect(ctx context.Context) (*pgx.Conn, error) {
	config, err := pgx.ParseConfig("host=fake user=fake database=fake sslmode=disable")
	if err != nil {
		return nil, err
	}
	config.LookupFunc = func(_ context.Context, host string) ([]string, error) { return []string{host}, nil }
	config.DialFunc = s.dial
	return pgx.ConnectConfig(ctx, config)
}

func (s *fakeServer) dial(context.Context, string, string) (net.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dials++
	if s.down {
		return nil, errors.New("connection refused")
	}
	client, server := net.Pipe()
	c := &fakeConn{server: s, net: server, listening: map[string]bool{}}
	if s.conns == nil {
		s.conns = map[*fakeConn]bool{}
	}
	s.conns[c] = true
	go c.serve()
	return client, nil
}

// notify is a Config.Notify.
func (s *fakeServer) notify(_ context.Context, channel, payload string) error {
	s.mu.Lock()
	conns := s.open()
	s.mu.Unlock()
	for _, c := range conns {
		c.notify(channel, payload)
	}
	return nil
}

// open lists the connections, without those that only ask to cancel another.
// s.mu is held.
func (s *fakeServer) open() []*fakeConn {
	var open []*fakeConn
	for c, regular := range s.conns {
		if regular {
			open = append(open, c)
		}
	}
	return open
}

func (s *fakeServer) connections() []*fakeConn {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open()
}

// terminate ends all connections, as pg_terminate_backend does.
func (s *fakeServer) terminate() {
	for _, c := range s.connections() {
		c.send(&pgproto3.ErrorResponse{Severity: "FATAL", Code: "57P01", Message: "terminating connection due to administrator command"})
		_ = c.net.Close()
	}
}

// freeze makes all connections half-open.
func (s *fakeServer) freeze() {
	for _, c := range s.connections() {
		c.mu.Lock()
		c.frozen = true
		c.mu.Unlock()
	}
}

func (c *fakeConn) notify(channel, payload string) {
	c.mu.Lock()
	listening := c.listening[channel] && !c.frozen
	c.mu.Unlock()
	if listening {
		c.send(&pgproto3.NotificationResponse{PID: 1, Channel: channel, Payload: payload})
	}
}

func (c *fakeConn) send(messages ...pgproto3.BackendMessage) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var buf []byte
	for _, m := range messages {
		buf, _ = m.Encode(buf)
	}
	_, _ = c.net.Write(buf)
}

// serve answers until the client is gone.
func (c *fakeConn) serve() {
	defer func() {
		_ = c.net.Close()
		c.server.set(func(s *fakeServer) { delete(s.conns, c) })
	}()
	backend := pgproto3.NewBackend(c.net, io.Discard)
	if m, err := backend.ReceiveStartupMessage(); err != nil {
		return
	} else if _, ok := m.(*pgproto3.CancelRequest); ok {
		c.server.set(func(s *fakeServer) { s.conns[c] = false })
		c.swallow()
		return
	}
	c.send(&pgproto3.AuthenticationOk{}, &pgproto3.BackendKeyData{ProcessID: 1, SecretKey: []byte("1234")}, ready)
	c.swallow()
	for {
		m, err := backend.Receive()
		if err != nil {
			return
		}
		switch m := m.(type) {
		case *pgproto3.Query:
			c.query(m.String)
		case *pgproto3.Terminate:
			return
		}
	}
}

// swallow reads until the client is gone, if the server is dead.
func (c *fakeConn) swallow() {
	var dead bool
	c.server.set(func(s *fakeServer) { dead = s.dead })
	if dead {
		_, _ = io.Copy(io.Discard, c.net)
	}
}

var ready = &pgproto3.ReadyForQuery{TxStatus: 'I'}

func (c *fakeConn) query(sql string) {
	channel, ok := strings.CutPrefix(strings.ReplaceAll(sql, `"`, ""), "listen ")
	if !ok {
		c.send(&pgproto3.ErrorResponse{Severity: "ERROR", Code: "42601", Message: "syntax error"}, ready)
		return
	}
	s := c.server
	s.mu.Lock()
	refuse, hang, pooled := s.refuse, s.hang, s.pooled
	if refuse {
		s.refused++
	}
	s.mu.Unlock()
	switch {
	case hang:
		return
	case refuse:
		c.send(&pgproto3.ErrorResponse{Severity: "ERROR", Code: "25006", Message: "cannot execute LISTEN during recovery"}, ready)
		return
	case !pooled:
		c.mu.Lock()
		c.listening[channel] = true
		c.mu.Unlock()
	}
	if s.onListen != nil {
		s.onListen(channel)
	}
	c.send(&pgproto3.CommandComplete{CommandTag: []byte("LISTEN")}, ready)
}
