"""What serving code imports: loader, compiler set-up, compile backend and kernel dispatch."""
